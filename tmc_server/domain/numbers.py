"""Numbers that mean different things have different types: mypy refuses one where another is expected. All are plain ints."""

from __future__ import annotations

from typing import NewType

Shard = NewType("Shard", int)
"""0 to 31: which of the sharded tables hold a message."""

MessageNumber = NewType("MessageNumber", int)
"""The 63-bit number of a message, see ids."""

SubscriptionNumber = NewType("SubscriptionNumber", int)
"""Given by the catalog from 1 on, never twice; 0 where there is none."""

Attempt = NewType("Attempt", int)
"""Which attempt of a delivery, from 1 on; 0: none yet, or not known."""

RunNumber = NewType("RunNumber", int)
"""A run of a handler, from 1 on: its consumer chooses a random one; 0: no handler has begun, as far as anybody knows.

ANSWERED: the attempt is over, it was nacked or taken back: no run of it begins any more.
"""

OrderHash = NewType("OrderHash", int)
"""Stands for an order key, see ordering."""

OrderSequence = NewType("OrderSequence", int)
"""The place of a message among those with its order key, see ordering."""

BulkJobNumber = NewType("BulkJobNumber", int)
"""Given by the catalog's database."""

NO_SUBSCRIPTION = SubscriptionNumber(0)
NO_JOB = BulkJobNumber(0)
NO_ATTEMPT = Attempt(0)
FIRST_ATTEMPT = Attempt(1)
NO_RUN = RunNumber(0)
ANSWERED = RunNumber(-1)
NO_SEQUENCE = OrderSequence(0)
NO_MESSAGE = MessageNumber(0)
"""Less than every message's."""
