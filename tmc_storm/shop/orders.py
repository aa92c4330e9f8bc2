"""An order, and the message that tells others about it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tmc_storm.shop import books


class ChangedMind(Exception):
    """The customer goes away; the transaction is rolled back."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order to take.

    key: of its message.  delay_s: 0, none.  is_refused: by its handlers.  is_undone: its transaction, where it has one.
    thinks_s: how long a transaction block waits before its commit.  number: within its order key.  text: something to carry.
    """

    key: str
    topic: str
    number: int = 0
    order_key: str = ""
    text: str = ""
    delay_s: int = 0
    is_refused: bool = False
    is_undone: bool = False
    thinks_s: float = 0.0

    @property
    def body(self) -> dict[str, Any]:
        return books.sealed(
            self.topic, self.key, {"key": self.key, "refuse": self.is_refused, "number": self.number, "text": self.text}
        )

    @property
    def delay(self) -> timedelta:
        return timedelta(seconds=self.delay_s)

    def row(self) -> Mapping[str, Any]:
        """Return its row in `sent`, as of now."""
        return {
            "message_key": self.key,
            "topic": self.topic,
            "is_refused": self.is_refused,
            "due_ms": round((time.time() + self.delay_s) * 1000) if self.delay_s else 0,
        }
