"""The center behind a broker: producers' calls as steps in a submit queue; docs/submit-queues.md describes these.

A call of the sender becomes a letter per item. The answers come back over the broker, too, and make up the response of the
call, so everything above it is as over gRPC. What is not answered in time is repeated, which is safe: every step is
idempotent. A repeat waits for the answer to the letter that is in the queue; it is put there again only after a while.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, Protocol

from google.protobuf import json_format
from google.rpc import code_pb2

from tmc_client import errors
from tmc_client.connecting.connection import Identity, announcement, without_secrets
from tmc_client.forks import notice_fork, watch_forks
from tmc_common import submission
from tmc_common.cloud_events import VERSION
from tmc_common.protocol import message_pb2
from tmc_common.signatures import netstring, sign

_SECRET_BYTES = 32
_SENT_AGAIN_S = 30.0
_FOUND = 10_000  # answers that are kept for repeats
_DESCRIBE = "DescribeChecks"
_OPERATIONS = {
    "PrepareMany": submission.PREPARE,
    "PublishMany": submission.PUBLISH,
    "SubmitMany": submission.SUBMIT,
    "RollbackMany": submission.ROLLBACK,
}
_ANNOUNCED = {"tmc-check-address": submission.CHECK_ADDRESS, "tmc-check-ledger": submission.CHECK_LEDGER}
"""Metadata of calls, and the attributes that say the same."""
_Metadata = Sequence[tuple[str, str]]
_Result = dict[str, Any]
"""A result of an item in the JSON of protobuf."""


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A step as a broker carries it. key: steps of one key go to one partition."""

    attributes: Mapping[str, str]
    key: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = ""
    body: bytes = b""


class Carrier(Protocol):
    """Brings letters to a queue of a broker, and answers back. Blocks; used by one thread at a time.

    Raises Unavailable: the broker, or the queue in it.  NotAuthenticated: the broker does not let us write there.
    InvalidRequest: it takes none of these letters, because of one of them or of our settings.
    """

    def reply(self, correlation: str) -> Mapping[str, str]:
        """Return the attributes that say where to answer a letter, if attributes say that."""

    def send(self, letters: Mapping[str, Letter], seconds: float) -> None:
        """Put them into the queue. letters: by correlation id."""

    def receive(self, seconds: float) -> Mapping[str, bytes]:
        """Return the answers that have come, by correlation id; wait for the first one. Others' may be among them."""

    def close(self) -> None: ...
    def after_fork(self) -> None:
        """Forget the connections of the parent, and leave them open."""


class SubmitQueue:
    """A connection for producers, see connection.Caller. Thread-safe."""

    def __init__(
        self, address: str, identity: Identity, carrier: Carrier, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """identity: with a tag; its key is the submit secret, "": the queue is not signed. Raises InvalidRequest: it is none."""
        self.address: str = without_secrets(address)
        self.identity: Identity = identity
        self._queue = submission.queue_of(identity.app, identity.tag)
        self._secret = _secret_of(identity.key)
        self._carrier = carrier
        self._monotonic = monotonic
        self._reset()
        watch_forks(self)

    def _reset(self) -> None:
        self._lock = Lock()  # of the identity
        self._carrying = Lock()  # of what follows, and of the carrier
        self._sent: dict[str, float] = {}  # when each letter without an answer was put into the queue
        self._found: dict[str, bytes] = {}  # answers to letters whose call has ended meanwhile
        self._is_closed = False

    def after_fork(self) -> None:
        """See forks.ForkAware."""
        self._carrier.after_fork()
        self._reset()

    def announce(self, check_address: str, ledger_id: bytes = b"") -> None:
        """See connection.Caller."""
        with self._lock:
            first = self.identity.check_address or check_address
            if check_address in ("", first):
                self.identity = replace(self.identity, check_address=first, check_ledger=ledger_id)

    def stream(self, _path: str, _response_class: Any, _requests: Iterator[Any]) -> Any:
        """Raises InvalidRequest: see connection.Caller."""
        raise _only_steps("Consuming")

    def unary(self, path: str, response_class: Any) -> Callable[..., Any]:
        """See connection.Caller. Calling it raises Unavailable; of DescribeChecks also NotAuthenticated, InvalidRequest."""
        name = path.rpartition("/")[2]
        if name == _DESCRIBE:
            return partial(self._describe, response_class)
        if name not in _OPERATIONS:
            raise _only_steps("Consuming" if "Consumption" in path else name)
        return partial(self._call, _OPERATIONS[name], response_class)

    def _describe(self, response_class: Any, _request: Any, timeout: float, metadata: _Metadata = ()) -> Any:
        if not self._secret:
            raise errors.InvalidRequest(
                "A queue that is not signed tells nobody the check token: open a signed one, or answer checks in a service that"
                " connects over gRPC."
            )
        attributes = {submission.OPERATION: submission.DESCRIBE, **self._announced(metadata)}
        (found,) = self._answers([Letter(attributes=attributes)], timeout)
        if "error" in found:
            kind = errors.Unavailable if found["error"]["code"] == code_pb2.UNAVAILABLE else errors.InvalidRequest
            raise kind(found["error"]["message"])
        return json_format.ParseDict(found, response_class(), ignore_unknown_fields=True)

    def _call(self, operation: str, response_class: Any, request: Any, timeout: float, metadata: _Metadata = ()) -> Any:
        announced = self._announced(metadata)
        letters = [_letter_of(operation, item, announced) for item in request.items]
        good = [letter for letter in letters if isinstance(letter, Letter)]
        answers = iter(self._results(good, timeout))
        results = [next(answers) if isinstance(letter, Letter) else letter for letter in letters]
        return json_format.ParseDict({"results": results}, response_class(), ignore_unknown_fields=True)

    def _results(self, letters: Sequence[Letter], seconds: float) -> list[_Result]:
        """Return a result for each. Raises Unavailable."""
        try:
            return self._answers(letters, seconds)
        except errors.NotAuthenticated as exc:
            return [_error(code_pb2.PERMISSION_DENIED, str(exc))] * len(letters)
        except errors.InvalidRequest as exc:
            if len(letters) == 1:
                return [_error(code_pb2.INVALID_ARGUMENT, str(exc))]
            half = len(letters) // 2  # one of them is too large, say: the others are not to suffer
            return self._results(letters[:half], seconds) + self._results(letters[half:], seconds)

    def _announced(self, metadata: _Metadata) -> dict[str, str]:
        """Return the attributes that say where checks are answered: unsigned, anybody could say that."""
        if not self._secret:
            return {}
        said = dict((*announcement(self.identity.check_address, self.identity.check_ledger), *metadata))
        return {attribute: said[name] for name, attribute in _ANNOUNCED.items() if name in said}

    def _answers(self, letters: Sequence[Letter], seconds: float) -> list[_Result]:
        """Return the answer to each, or an error if there is none in time.

        Raises Unavailable, NotAuthenticated, InvalidRequest.
        """
        notice_fork()
        asked = [_correlation_of(letter) for letter in letters]
        end = self._monotonic() + seconds
        with self._carrier_within(seconds):
            self._send(dict(zip(asked, letters, strict=True)), end)
            while any(each not in self._found for each in asked) and (left := end - self._monotonic()) > 0:
                for correlation, answer in self._carrier.receive(left).items():
                    if self._sent.pop(correlation, None) is not None:
                        self._found[correlation] = answer
            found = {each: self._found.pop(each) for each in set(asked) if each in self._found}
        missing = _error(
            code_pb2.UNAVAILABLE,
            "The center has not answered in its submit queue: is a server up, and key= the submit secret of"
            f" {self._queue}? What it refuses without an answer is in {submission.dead_queue_of(self.identity.app)}.",
        )
        return [json.loads(found[each]) if each in found else missing for each in asked]

    @contextmanager
    def _carrier_within(self, seconds: float) -> Iterator[None]:
        """Hold the carrier. Raises Unavailable: somebody else does, or this was closed."""
        if not self._carrying.acquire(timeout=max(seconds, 0.0)):
            raise errors.Unavailable("Other calls wait for the broker.")
        try:
            if self._is_closed:
                raise errors.Unavailable("This connection was closed: connect again.")
            yield
        except errors.TmcError:
            self._sent.clear()  # who knows what became of them
            raise
        finally:
            self._carrying.release()

    def _send(self, letters: Mapping[str, Letter], end: float) -> None:
        """Put into the queue what is not there."""
        now = self._monotonic()
        self._sent = {each: at for each, at in self._sent.items() if now - at < _SENT_AGAIN_S}
        if len(self._found) > _FOUND:
            self._found = {}  # of calls that nobody repeated
        new = {each: letter for each, letter in letters.items() if each not in self._sent and each not in self._found}
        if new:
            self._sent |= dict.fromkeys(new, now)
            self._carrier.send({each: self._signed(letter, each) for each, letter in new.items()}, end - now)

    def _signed(self, letter: Letter, correlation: str) -> Letter:
        attributes = {
            submission.SPECVERSION: VERSION,
            submission.SOURCE: f"/tmc/{self.identity.app}",
            **letter.attributes,
            **self._carrier.reply(correlation),
        }
        if self._secret:
            content = submission.signed(self._queue, attributes, letter.content_type, letter.body, letter.headers)
            attributes[submission.SIGNATURE] = sign(self._secret, content)
        return replace(letter, attributes=attributes)

    def close(self) -> None:
        with self._carrying:
            self._is_closed = True
            self._carrier.close()


def _secret_of(key: str) -> bytes:
    """Raises InvalidRequest."""
    try:
        secret = bytes.fromhex(key)
    except ValueError:
        secret = b"?"
    if len(secret) not in (0, _SECRET_BYTES):
        raise errors.InvalidRequest(
            "key= is no submit secret: give the 64 hexadecimal digits that `tmc admin open-submit-queue` printed.",
            field="key",
        )
    return secret


def _correlation_of(letter: Letter) -> str:
    """Return the same for a repeat, so that the answer to either will do; of what names no attempt, a new one."""
    names = [letter.attributes.get(name, "") for name in (submission.OPERATION, submission.TYPE, submission.SUBJECT)]
    attempt = letter.attributes.get(submission.ID) or uuid.uuid4().hex
    return hashlib.sha256(b"".join(map(netstring, [*names, attempt]))).hexdigest()[:32]


def _error(code: int, message: str, field_name: str = "") -> _Result:
    return {"error": {"code": code, "message": message, "field": field_name}}


def _letter_of(operation: str, item: Any, announced: Mapping[str, str]) -> Letter | _Result:
    """Make a step of an item of a batch, or the result that refuses it."""
    if not item.attempt_id:
        sentence = "Through a submit queue, a message is decided by what prepare() returned, and not by its id alone."
        return _error(code_pb2.INVALID_ARGUMENT, sentence, "message_id")
    attributes = {
        submission.OPERATION: operation,
        submission.ID: item.attempt_id.hex(),
        submission.TYPE: item.topic,
        submission.SUBJECT: item.key,
        **announced,
    }
    optional: dict[str, str] = {}
    if not isinstance(item, message_pb2.PrepareRequest | message_pb2.PublishRequest):
        optional[submission.MESSAGE_ID] = item.message_id
        return Letter(attributes=_with(attributes, optional), key=item.key)
    optional |= {submission.ORDER_KEY: item.order_key, submission.DELAY_MS: str(item.delay_ms or "")}
    if isinstance(item, message_pb2.PrepareRequest):
        optional |= {
            submission.LEDGER_ID: item.ledger_id.hex(),
            submission.CHECK_TARGET: item.check_target,
            submission.TRANSACTION_MS: str(item.transaction_time_ms or ""),
        }
    return Letter(
        attributes=_with(attributes, optional),
        key=item.key,
        headers=dict(item.headers),
        content_type=item.content_type,
        body=item.body,
    )


def _with(attributes: Mapping[str, str], optional: Mapping[str, str]) -> Mapping[str, str]:
    return {**attributes, **{name: text for name, text in optional.items() if text}}


def _only_steps(what: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"{what} goes over gRPC: connect to host:port. A submit queue only takes what producers prepare, publish, submit and roll"
        " back."
    )
