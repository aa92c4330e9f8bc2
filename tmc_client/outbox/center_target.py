"""Send to the center: it stores a message once, however often it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from tmc_client import errors
from tmc_client.outbox.entries import Entry, Failure, Trouble
from tmc_client.producing.producer import Producer, wait

_TIMEOUT = timedelta(seconds=10)
_OF_A_TOPIC = ("OPEN_LIMIT", "UNACKED_LIMIT")  # messages of others are taken
_AWAY = (errors.Unavailable, errors.DeadlineExceeded, errors.Overloaded, errors.NotAuthenticated)


class CenterTarget:
    """entries.Target over the producer of a Center."""

    delays = True

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def send(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        """See entries.Target."""
        calls = []
        for entry in entries:
            try:
                calls.append(self._producer.publish(entry.request(), _TIMEOUT))
            except errors.TmcError as exc:
                return [_failure(exc)] * len(entries)  # the connection was closed
        found: list[Failure | None] = []
        for call in calls:
            try:
                wait(call, _TIMEOUT)
            except errors.TmcError as exc:
                found.append(_failure(exc))
            else:
                found.append(None)
        return found

    def close(self) -> None:
        """The center belongs to the program."""


def _failure(exc: errors.TmcError) -> Failure:
    if isinstance(exc, _AWAY) and exc.reason not in _OF_A_TOPIC:
        trouble = Trouble.AWAY
    elif isinstance(exc, errors.KeyInProgress | errors.CenterFault) or exc.retryable:
        trouble = Trouble.LATER
    else:
        trouble = Trouble.REFUSED
    return Failure(trouble=trouble, error=str(exc))
