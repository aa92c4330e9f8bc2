"""Letters that were read from a submit queue, and the steps of messages that they ask for.

Two formats are understood: CloudEvents in binary mode, see `tmc_common.submission`, and the JSON of TrustMessage.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tmc_common import submission as wire
from tmc_common.cloud_events import VERSION
from tmc_common.headers import FORWARD_KEY
from tmc_common.signatures import key_id, key_id_of, verify
from tmc_server.domain.catalog import App, SubmitQueue
from tmc_server.domain.ports.checks import Instance
from tmc_server.errors import CredentialsInvalid, InvalidField
from tmc_server.requests import validation

_ID = re.compile(r"[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_DIRECT = re.compile(re.escape(wire.DIRECT_REPLIES) + r"\.[A-Za-z0-9._+/=-]{1,220}", re.ASCII)
_QUEUE = re.compile(r"[A-Za-z0-9._-]{1,249}", re.ASCII)  # as Kafka allows
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_TRUST_MESSAGE = {1: wire.PREPARE, 2: wire.SUBMIT, 3: wire.ROLLBACK}
"""Its messageStatus. Source: TrustMessage, MessageStatus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A submit queue by its name: everybody who may write there is that app, in that environment."""

    app: str
    tag: str

    @property
    def queue(self) -> str:
        return wire.queue_of(self.app, self.tag)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Letter:
    """A message of a broker, whichever it was.

    number: by which its reader knows it.  attributes: of CloudEvents, without prefix.  headers: the message's own.
    reply_to: where an answer is wanted; "": none.  correlation_id: goes into the answer.  is_damaged: a header is no text.
    """

    number: int
    attributes: Mapping[str, str]
    headers: Mapping[str, str]
    content_type: str
    body: bytes
    reply_to: str = ""
    correlation_id: str = ""
    is_damaged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The operation that a letter asks for. key, topic "": of `describe`.  The other fields are those of the RPC of that name."""

    operation: str
    topic: str = ""
    key: str = ""
    attempt_id: bytes = b""
    message_id: str = ""
    body: bytes = b""
    content_type: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    order_key: str = ""
    delay_ms: int = 0
    ledger_id: bytes = b""
    check_target: str = ""
    transaction_time_ms: int = 0
    instance: Instance | None = None

    @property
    def stores(self) -> bool:
        """Return whether it brings a message."""
        return self.operation in (wire.PREPARE, wire.PUBLISH)


def authenticate(letter: Letter, place: Place, queue: SubmitQueue) -> None:
    """Raises CredentialsInvalid: this queue's messages are signed, and this one is not, or by another secret."""
    if not queue.secrets:
        return
    content = wire.signed(place.queue, letter.attributes, letter.content_type, letter.body, letter.headers)
    signature = letter.attributes.get(wire.SIGNATURE, "")
    if any(verify(secret, content, signature) for secret in queue.secrets):
        return
    if not signature:
        raise CredentialsInvalid(f"{wire.SIGNATURE} is missing: what is in {place.queue} is signed.")
    if key_id_of(signature) not in {key_id(secret) for secret in queue.secrets}:
        raise CredentialsInvalid(
            f"{wire.SIGNATURE} is not of the form v1=KEY_ID:MAC with a submit secret of {place.queue}."
        )
    raise CredentialsInvalid(
        f"{wire.SIGNATURE} names a submit secret of {place.queue}, but does not fit what arrived: compare what you sign with "
        "the page on submit queues."
    )


def step_of(letter: Letter, app: App) -> Step:
    """Raises InvalidField."""
    if letter.is_damaged:
        raise InvalidField("headers", "have values that are texts in UTF-8")
    if letter.attributes:
        return _of_cloud_event(letter)
    return _of_trust_message(letter, app)


def may_reply_to(name: str, app: str) -> bool:
    """Return whether an app may have answers sent there: the center may write where the app may not."""
    is_own = name.startswith(wire.replies_of(app)) and _QUEUE.fullmatch(name) is not None
    return is_own or _DIRECT.fullmatch(name) is not None


def _of_cloud_event(letter: Letter) -> Step:
    given = letter.attributes
    if given.get(wire.SPECVERSION) != VERSION:
        raise InvalidField(wire.SPECVERSION, f"be {VERSION}")
    if any(name.startswith("tmc") and name not in wire.EXTENSIONS for name in given):
        raise InvalidField(
            "attributes", "not have names that begin with tmc, other than those of docs/submit-queues.md"
        )
    operation = given.get(wire.OPERATION, "")
    if operation == wire.DESCRIBE:
        return Step(operation=operation, instance=_instance(given))
    if operation not in (wire.PREPARE, wire.SUBMIT, wire.ROLLBACK, wire.PUBLISH):
        raise InvalidField(wire.OPERATION, "be prepare, submit, rollback or publish")
    identity = given.get(wire.ID, "")
    if not _ID.fullmatch(identity):
        raise InvalidField(wire.ID, "be the attempt id: 16 bytes as 32 hexadecimal digits or as a UUID")
    context = {name: given[name] for name in wire.CONTEXT if name in given and name not in letter.headers}
    return Step(
        operation=operation,
        topic=given.get(wire.TYPE, ""),
        key=given.get(wire.SUBJECT, ""),
        attempt_id=bytes.fromhex(identity.replace("-", "")),
        message_id=given.get(wire.MESSAGE_ID, ""),
        body=letter.body,
        content_type=letter.content_type,
        headers={**letter.headers, **context} if context else letter.headers,
        order_key=given.get(wire.ORDER_KEY, ""),
        delay_ms=_number(given, wire.DELAY_MS),
        ledger_id=validation.hexadecimal_id(given.get(wire.LEDGER_ID, ""), wire.LEDGER_ID),
        check_target=given.get(wire.CHECK_TARGET, ""),
        transaction_time_ms=_number(given, wire.TRANSACTION_MS),
        instance=_instance(given),
    )


def _number(given: Mapping[str, str], name: str) -> int:
    text = given.get(name, "0")
    if not _NUMBER.fullmatch(text):
        raise InvalidField(name, "be milliseconds in decimal")
    return int(text)


def _instance(given: Mapping[str, str]) -> Instance | None:
    address = validation.address(given.get(wire.CHECK_ADDRESS, ""), wire.CHECK_ADDRESS)
    ledger_id = validation.hexadecimal_id(given.get(wire.CHECK_LEDGER, ""), wire.CHECK_LEDGER)
    return Instance(address, ledger_id) if address else None


def _of_trust_message(letter: Letter, app: App) -> Step:
    """Return the step that TrustMessage's JSON asks for.

    It has no attempt ids: all steps of one business id and key are one attempt. Its verifyInfo is not used: the checks of
    a topic are set by operators.
    """
    try:
        given = json.loads(letter.body)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise InvalidField(wire.OPERATION, "be given: this is no CloudEvent, and no JSON object of TrustMessage")
    status = given.get("messageStatus")
    if type(status) is not int or status not in _TRUST_MESSAGE:
        raise InvalidField("messageStatus", "be 1 (prepare), 2 (commit) or 3 (rollback)")
    topic, key, content, forward_key = (
        _text(given, name) for name in ("forwardTopic", "messageKey", "message", "forwardKey")
    )
    if given.get("bizID", app.biz_id) not in (app.biz_id, _as_number(app.biz_id)):
        raise InvalidField("bizID", f"be {app.biz_id}, the business id of {app.id}")
    names = "\0".join((app.biz_id, topic, key))
    return Step(
        operation=_TRUST_MESSAGE[status],
        topic=topic,
        key=key,
        attempt_id=hashlib.sha256(names.encode()).digest()[:16],
        body=content.encode(),
        content_type="text/plain",
        headers={FORWARD_KEY: forward_key} if forward_key else {},
    )


def _text(given: Mapping[str, object], name: str) -> str:
    value = given.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidField(name, "be a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidField(name, "be text in UTF-8") from None
    return value


def _as_number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None
