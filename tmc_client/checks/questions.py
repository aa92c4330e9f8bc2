"""A check as the producer sees it: the question, the verdict, the answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Verdict(IntEnum):
    """The outcome of a local transaction. UNKNOWN: it is open or cannot be determined; the center asks again."""

    COMMIT = 1
    ROLLBACK = 2
    UNKNOWN = 3


@dataclass(frozen=True, kw_only=True)
class Question:
    """A check of one message. attempt_id: distinguishes this attempt from others with the same key.

    ledger_id: the ledger it was prepared with, empty without one.  created_ms: when it was prepared, in milliseconds
    since the epoch, by the center's clock.
    """

    message_id: str
    topic: str
    key: str
    attempt_id: bytes = b""
    ledger_id: bytes = b""
    created_ms: int = 0


class Because(IntEnum):
    """Why an answer is UNKNOWN: tmc.v1.UnknownReason. Only UNSPECIFIED counts toward the topic's limit of checks."""

    UNSPECIFIED = 0
    NOT_NOW = 1
    WRONG_LEDGER = 2


@dataclass(frozen=True)
class Answer:
    """The answer to a check. detail: one line for operators.  because: of an UNKNOWN."""

    verdict: Verdict
    detail: str = ""
    because: Because = Because.UNSPECIFIED

    @classmethod
    def not_now(cls, detail: str) -> Answer:
        """Nothing can be said now: the center asks again, and does not count it."""
        return cls(Verdict.UNKNOWN, detail, Because.NOT_NOW)


class Denied(Exception):
    """The caller did not present the app's check token."""
