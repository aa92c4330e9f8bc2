"""A check as the producer sees it: the question, the verdict, the answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Verdict(IntEnum):
    """What became of a local transaction. UNKNOWN: it is open, or nobody can tell; the center asks again."""

    COMMIT = 1
    ROLLBACK = 2
    UNKNOWN = 3


@dataclass(frozen=True, kw_only=True)
class Question:
    """About one message. attempt_id tells this attempt from any other with its key.

    ledger_id: the ledger it was prepared with, empty without one.  created_ms: milliseconds since the epoch, when it was
    prepared, by the center's clock.
    """

    message_id: str
    topic: str
    key: str
    attempt_id: bytes = b""
    ledger_id: bytes = b""
    created_ms: int = 0


@dataclass(frozen=True)
class Answer:
    """detail: for the operators, one line."""

    verdict: Verdict
    detail: str = ""


class Denied(Exception):
    """Whoever asks did not show the app's check token."""
