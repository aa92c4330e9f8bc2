"""Ids that name a shard that their topic does not use: nothing looks there, since it would cost others their lanes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.outlet import SomeCatalog
from tmc_server.domain.numbers import Attempt, RunNumber
from tmc_server.errors import MessageUnknown, SubscriptionUnknown
from tmc_server.requests.acking import Acking
from tmc_server.requests.caller import Caller, RateLimiter
from tmc_server.requests.deciding import Deciding
from tmc_server.requests.lookup import Lookup

NOBODY: Any = None
CATALOG: Any = SomeCatalog("coupons")  # its topics have one shard, 0
PRODUCER, CONSUMER = (Caller(app=CATALOG.current.apps[number], tag="default") for number in (1, 2))


def _ids() -> list[str]:
    return [f"1-1-{shard:02d}-77" for shard in range(32)]


def test_acks_and_nacks() -> None:
    acking = Acking(CATALOG, NOBODY, RateLimiter(0))
    makers: list[Any] = [
        lambda id_: acking.ack(CONSUMER, id_),
        lambda id_: acking.nack(CONSUMER, id_, Attempt(1), "", False, None),
        lambda id_: acking.give_back(CONSUMER, id_, Attempt(1)),
        lambda id_: acking.extend(CONSUMER, id_, Attempt(1), 1000, RunNumber(1)),
    ]
    right, *wrong = _ids()
    for make in makers:
        assert make(right).shard == 0
        for id_ in wrong:
            with pytest.raises(SubscriptionUnknown):
                make(id_)


def test_submits_and_rollbacks() -> None:
    deciding = Deciding(CATALOG, NOBODY, RateLimiter(0), NOBODY)
    right, *wrong = _ids()

    def decide(id_: str) -> Any:
        return deciding.item(PRODUCER, commit=True, message_id=id_, topic="", key="", attempt_id=b"")

    assert decide(right).shard == 0
    for id_ in wrong:
        with pytest.raises(MessageUnknown):
            decide(id_)


def test_reads() -> None:
    """NOBODY reads: an id that should be looked for would be an AttributeError."""
    lookup = Lookup(CATALOG, NOBODY)
    right, *wrong = _ids()
    for caller, ids in ((PRODUCER, wrong), (CONSUMER, _ids())):
        for id_ in ids:
            with pytest.raises(MessageUnknown):
                asyncio.run(lookup.own_message(caller, id_, "", ""))
    with pytest.raises(AttributeError):
        asyncio.run(lookup.own_message(PRODUCER, right, "", ""))
