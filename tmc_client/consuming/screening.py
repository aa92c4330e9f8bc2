"""Verify the signatures of copies from a broker's queue: copies that the center did not sign reach no handler.

Most copies are verified immediately, in the transport's thread, with the keys received from the center. A copy with
an unknown key or topic is held back until the center has been asked again: keys are rotated, and a queue may get more
topics. A forged copy is acked to the broker, counted, logged and reported, so that the subscription's owner is
alerted; the message whose id it carries is not affected. However many copies are forged, they cost the center at most
one query per _ASK_S and one report per _REPORT_S. Source: docs/decisions/0017-signed-deliveries.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from tmc_client import errors
from tmc_client.consuming.received import Message, OnMessage, Receipt
from tmc_common import signatures
from tmc_common.protocol import consumption_pb2

log = logging.getLogger("tmc_client.consumer")

_ASK_S = 0.5
_ASK_WITHOUT_KEYS_S = 300.0
_REPORT_S = 1.0


class Verdict(Enum):
    """Result of verifying a copy with the keys known here."""

    GENUINE = auto()
    FORGED = auto()
    UNKNOWN = auto()  #: the center may have other keys by now


@dataclass(frozen=True, kw_only=True)
class _Subscription:
    keys: Mapping[str, bytes]  # by their ids
    queue: str


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A copy to be verified. signature: as received, of any type; None: it has none.  queue: where it came from."""

    message: Message
    signature: object
    queue: str
    receipt: Receipt


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Screening's calls to the center. Both block, and raise TmcError."""

    describe: Callable[[], object]
    report: Callable[[consumption_pb2.ReportForgedCopiesRequest], object]


class Screen:
    """forged: number of copies that were refused. Its thread starts with the first copy that is not genuine."""

    def __init__(self, calls: Calls, on_message: OnMessage, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._calls = calls
        self._on_message = on_message
        self._monotonic = monotonic
        self.forged: int = 0
        self._subscriptions: Mapping[str, _Subscription] = {}
        self._verifies = False
        self._asked, self._reported = monotonic(), float("-inf")
        self._unreported: dict[str, tuple[int, str]] = {}  # by topic: how many, the id that one of them claims
        self._suspects: deque[Suspect] = deque()
        self._curious = False  # ask, although no copy waits for the answer
        self._condition = threading.Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def learn(self, plan: consumption_pb2.DescribeSubscriptionsResponse) -> None:
        """Store the keys received from the center. Without any, signing is off and every copy counts as genuine."""
        self._subscriptions = {
            found.topic: _Subscription(
                keys={signatures.key_id(secret): secret for secret in map(bytes.fromhex, found.delivery_keys)},
                queue=found.queue,
            )
            for found in plan.subscriptions
        }
        self._verifies = any(found.keys for found in self._subscriptions.values())
        self._asked = self._monotonic()

    def arrive(self, suspect: Suspect) -> None:
        """Pass a copy on to its handler, or hold it back. Called in the transport's thread; does not block."""
        if self.judge(suspect.message, suspect.signature) is Verdict.GENUINE:
            self._on_message(suspect.message, suspect.receipt)
            if not self._verifies and self._is_time_to_ask_again(suspect.signature):
                self._wake(curious=True)
        else:
            self._wake(suspect)

    def judge(self, message: Message, signature: object) -> Verdict:
        if not self._verifies:
            return Verdict.GENUINE
        found = self._subscriptions.get(message.topic)
        if found is None:
            return Verdict.UNKNOWN
        if not found.keys:
            return Verdict.GENUINE
        secret = found.keys.get(signatures.key_id_of(signature))
        if secret is None:
            return Verdict.FORGED if signature is None else Verdict.UNKNOWN
        genuine = signatures.verify(secret, signed_content(message), str(signature))
        return Verdict.GENUINE if genuine else Verdict.FORGED

    def _is_time_to_ask_again(self, signature: object) -> bool:
        """Return whether to ask for keys again: signing may be on by now."""
        pause_s = _REPORT_S * 10 if signature is not None else _ASK_WITHOUT_KEYS_S
        return not self._curious and self._monotonic() - self._asked >= pause_s

    def _wake(self, suspect: Suspect | None = None, curious: bool = False) -> None:
        with self._condition:
            if suspect is not None:
                self._suspects.append(suspect)
            self._curious |= curious
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name="tmc-screen", daemon=True)
                self._thread.start()
            self._condition.notify()

    def stop(self) -> None:
        """Stop screening; copies held back are redelivered. Does not wait for a call in flight."""
        self._stopping.set()
        with self._condition:
            self._condition.notify()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._condition:
                while not self._has_work():
                    self._condition.wait(self._report_in_s() if self._unreported else None)
                suspects, self._suspects = list(self._suspects), deque()
            try:
                self._sort(suspects)
                self._report()
            except Exception:  # a bug of ours; the copies it affected are redelivered on the next connection
                log.exception("copies could not be screened")

    def _has_work(self) -> bool:
        reports = bool(self._unreported) and self._report_in_s() <= 0
        return bool(self._suspects) or self._curious or reports or self._stopping.is_set()

    def _report_in_s(self) -> float:
        return self._reported + _REPORT_S - self._monotonic()

    def _sort(self, suspects: list[Suspect]) -> None:
        """Pass on or refuse each copy; asks the center first if one of them may be signed with an unknown key."""
        verdicts = [self.judge(each.message, each.signature) for each in suspects]
        if (Verdict.UNKNOWN in verdicts or self._curious) and not self._ask_again():
            return  # we were stopped: copies held back are redelivered
        for suspect in suspects:
            if self.judge(suspect.message, suspect.signature) is Verdict.GENUINE:
                self._on_message(suspect.message, suspect.receipt)
            else:
                self._drop(suspect)

    def _ask_again(self) -> bool:
        """Ask for keys once per _ASK_S until the center answers. Returns False: we were stopped."""
        while not self._stopping.wait(max(0.0, self._asked + _ASK_S - self._monotonic())):
            self._asked = self._monotonic()
            self._curious = False
            try:
                self._calls.describe()  # which tells `learn`
            except errors.TmcError as exc:
                log.debug("the center does not tell its keys now: %s", exc)
            else:
                return True
        return False

    def _drop(self, suspect: Suspect) -> None:
        claimed = suspect.message
        with self._condition:
            self.forged += 1
            topic = claimed.topic if claimed.topic in self._subscriptions else self._topic_of(suspect.queue)
            count, first = self._unreported.get(topic, (0, claimed.id))
            self._unreported[topic] = count + 1, first
            self._condition.notify()
        suspect.receipt.answered()

    def _topic_of(self, queue: str) -> str:
        return next((topic for topic, found in self._subscriptions.items() if found.queue == queue), "")

    def _report(self) -> None:
        """Report forged copies, at most once per _REPORT_S; a failed report is only logged."""
        with self._condition:
            if not self._unreported or self._report_in_s() > 0:
                return
            self._reported = self._monotonic()
            reports, self._unreported = self._unreported, {}
        for topic, (count, claimed) in reports.items():
            log.error(
                "%d copies for %s were not signed by the center and are dropped (%d so far); one claims to be message %s",
                count,
                topic or "no topic of ours",
                self.forged,
                claimed,
            )
            request = consumption_pb2.ReportForgedCopiesRequest(topic=topic, count=count, message_id=claimed[:100])
            try:
                self._calls.report(request)
            except errors.TmcError as exc:
                log.warning("forged copies could not be reported to the center: %s", exc)


def signed_content(message: Message) -> bytes:
    """Return what the signature of a copy covers: all that its handler gets."""
    return signatures.content(
        message_id=message.id,
        attempt=message.attempt,
        topic=message.topic,
        key=message.key,
        content_type=message.content_type,
        producer=message.producer,
        subscriber=message.subscriber,
        interval_ms=message.interval_ms,
        body_digest=signatures.body_digest(message.body),
        headers=message.headers,
    )
