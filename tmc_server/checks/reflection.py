"""Kind `reflection`: any unary gRPC method of a service that describes itself, called without its stubs.

Options: method (package.Service/Method), request (JSON with placeholders such as "{key}"), verdict (path of the field that
says it), COMMIT, ROLLBACK, UNKNOWN (the values that mean it, several with commas), echo (path of a field that has to repeat
the key or the message id). A value that looks like an empty answer decides nothing: it is refused when the target
is set, and UNKNOWN when it comes.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tmc_server.checks.channels import TOKEN_KEY, Channels, call_each
from tmc_server.checks.descriptors import Method, Undescribed, describe
from tmc_server.domain.checks import CheckAnswer, CheckReason, CheckTarget, Question, Verdict
from tmc_server.domain.ports.checks import Endpoint
from tmc_server.errors import CheckRefused

_FRESH_S = 600.0
_BAD_S = 60.0
_NEEDED = ("method", "request", "verdict")
_VERDICTS = ("COMMIT", "ROLLBACK", "UNKNOWN")
_PLACEHOLDERS = {"message_id", "topic", "key", "biz_id", "attempt_id"}
_BRACES = re.compile(r"\{(\w+)\}")
_PLACEHOLDER = re.compile(r"\{(message_id|topic|key|biz_id|attempt_id)\}")
_SAMPLE = Question(
    message_id="1-1-0-1", topic="topic", key="key", biz_id="biz", attempt_id=b"\0" * 16, ledger_id=b"", created_ms=0
)
_REDEPLOYED = {CheckReason.NO_METHOD, CheckReason.NOT_UNDERSTOOD, CheckReason.FAILED}


class ReflectionChecks:
    """domain.ports.checks.Asker. Descriptors are cached for ten minutes, and dropped when a service seems to have changed.

    What cannot be described is cached too, for a minute: it may be a megabyte that somebody sends for each batch.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._lock = threading.Lock()
        self._known: dict[tuple[Endpoint, bool, str], tuple[float, Method | Undescribed]] = {}

    def accept(self, target: CheckTarget) -> None:
        unknown = set(target.options) - {*_NEEDED, *_VERDICTS, "echo"}
        if unknown:
            raise CheckRefused(f"reflection knows no option {', '.join(sorted(unknown))}.")
        for name in _NEEDED:
            if not target.options.get(name):
                raise CheckRefused(f"reflection needs the option {name}.")
        service, _, method = target.options["method"].partition("/")
        if not service or not method or "/" in method:
            raise CheckRefused("The option method is package.Service/Method.")
        try:
            template = json.loads(target.options["request"])
        except (ValueError, RecursionError) as exc:
            raise CheckRefused(f"The option request is no JSON: {exc}.") from exc
        if not isinstance(template, dict):
            raise CheckRefused('The option request is a JSON object, for example {"order_id": "{key}"}.')
        named = set(_BRACES.findall(target.options["request"]))
        if not named <= _PLACEHOLDERS:
            known = ", ".join(sorted(f"{{{name}}}" for name in _PLACEHOLDERS))
            raise CheckRefused(
                f"The option request knows no {{{sorted(named - _PLACEHOLDERS)[0]}}}: take one of {known}."
            )
        if not named & {"key", "message_id"}:
            raise CheckRefused(
                "The option request needs {key} or {message_id}: without it every message gets the same answer."
            )
        meanings = [value for name in _VERDICTS for value in _values(target, name)]
        if not (_values(target, "COMMIT") and _values(target, "ROLLBACK")):
            raise CheckRefused("reflection needs the options COMMIT and ROLLBACK: the values that mean them.")
        if len(set(meanings)) != len(meanings):
            raise CheckRefused("Each value means one verdict only.")

    def asks_singly(self, target: CheckTarget) -> bool:
        return True

    def examine(self, target: CheckTarget, endpoint: Endpoint, token: str) -> None:
        self._forget(target, endpoint)  # it may have been mended
        try:
            method = self._describe(target, endpoint, token)
        except Undescribed as exc:
            raise CheckRefused(f"{endpoint}: {exc}") from exc
        self._request(target, method, _SAMPLE)
        verdict = _field(method.response, target.options["verdict"], "verdict")
        _refuse_defaults(target, verdict)
        _refuse_strangers(target, verdict)
        if target.options.get("echo"):
            _field(method.response, target.options["echo"], "echo")

    def render(self, target: CheckTarget, question: Question) -> str:
        return f"{target.options['method']} {json.dumps(_filled(json.loads(target.options['request']), question))}"

    def ask(
        self, target: CheckTarget, endpoint: Endpoint, token: str, questions: Sequence[Question], until: float
    ) -> list[CheckAnswer]:
        try:
            method = self._describe(target, endpoint, token)
            requests = [self._request(target, method, question) for question in questions]
        except Undescribed as exc:
            return [CheckAnswer.unknown(exc.reason, str(exc))] * len(questions)
        except CheckRefused as exc:  # the service took other fields when the target was set
            self._forget(target, endpoint)
            return [CheckAnswer.unknown(CheckReason.BAD_DESCRIPTION, exc.sentence)] * len(questions)
        raw = call_each(self._channels.method(target, endpoint, method.path), requests, target, token, until)
        answers = [
            answer if isinstance(answer, CheckAnswer) else _read(target, method, question, answer)
            for question, answer in zip(questions, raw, strict=True)
        ]
        if any(answer.reason in _REDEPLOYED for answer in answers):
            self._forget(target, endpoint)
        return answers

    def _describe(self, target: CheckTarget, endpoint: Endpoint, token: str) -> Method:
        name = (endpoint, target.tls, target.options["method"])
        with self._lock:
            until, known = self._known.get(name, (0.0, None))
        if known is None or time.monotonic() >= until:
            known = self._described(target, endpoint, token)
            with self._lock:
                now = time.monotonic()
                self._known = {key: value for key, value in self._known.items() if value[0] > now}
                self._known[name] = (now + (_FRESH_S if isinstance(known, Method) else _BAD_S), known)
        if isinstance(known, Undescribed):
            raise known.with_traceback(None)
        return known

    def _described(self, target: CheckTarget, endpoint: Endpoint, token: str) -> Method | Undescribed:
        """Raises Undescribed for what may be otherwise a moment later."""
        channel = self._channels.channel(target, endpoint)
        try:
            return describe(channel, target.options["method"], ((TOKEN_KEY, token),), target.deadline_ms / 1000)
        except Undescribed as exc:
            if exc.reason is not CheckReason.BAD_DESCRIPTION:
                raise
            return exc

    def _forget(self, target: CheckTarget, endpoint: Endpoint) -> None:
        with self._lock:
            self._known.pop((endpoint, target.tls, target.options["method"]), None)

    def _request(self, target: CheckTarget, method: Method, question: Question) -> bytes:
        filled = _filled(json.loads(target.options["request"]), question)
        try:
            made = json_format.ParseDict(filled, method.request(), descriptor_pool=method.pool)
        except (json_format.ParseError, TypeError, KeyError) as exc:
            raise CheckRefused(f"The request does not fit {target.options['method']}: {exc}") from exc
        data: bytes = made.SerializeToString()
        return data

    def close(self) -> None:
        """The caller of __init__ closes the channels."""


def _values(target: CheckTarget, verdict: str) -> list[str]:
    return [value.strip() for value in target.options.get(verdict, "").split(",") if value.strip()]


def _filled(template: Any, question: Question) -> Any:
    if isinstance(template, dict):
        return {name: _filled(value, question) for name, value in template.items()}
    if isinstance(template, list):
        return [_filled(value, question) for value in template]
    if isinstance(template, str):  # in one go: what stands in a key is never a placeholder
        return _PLACEHOLDER.sub(lambda found: _written(getattr(question, found[1])), template)
    return template


def _written(value: str | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else value


def _field(response: type[Message], path: str, option: str) -> FieldDescriptor:
    """The field at the end of a path. Raises CheckRefused."""
    descriptor = response.DESCRIPTOR
    field: Any = None
    for part in path.split("."):
        field = None if descriptor is None else descriptor.fields_by_name.get(part)
        if field is None or field.is_repeated:
            where = descriptor.full_name if descriptor is not None else path
            raise CheckRefused(f"{where} has no single field {part!r}: correct the option {option}.")
        descriptor = field.message_type
    if descriptor is not None:
        raise CheckRefused(f"The field {path} is a message: let the option {option} go on to one of its fields.")
    return field


def _refuse_defaults(target: CheckTarget, field: FieldDescriptor) -> None:
    """COMMIT and ROLLBACK must differ from what an empty answer looks like."""
    if field.has_presence:
        return
    empty = _text(field, field.default_value)
    for verdict in ("COMMIT", "ROLLBACK"):
        if empty & set(_values(target, verdict)):
            raise CheckRefused(
                f"{verdict} cannot be {'/'.join(sorted(empty))} of {field.name}: an empty answer looks the same. Make the "
                "field optional, or let another value say it."
            )


def _refuse_strangers(target: CheckTarget, field: FieldDescriptor) -> None:
    """Refuse values that the verdict's enum does not have."""
    if field.enum_type is None:
        return
    known = {value.name for value in field.enum_type.values} | {str(value.number) for value in field.enum_type.values}
    for verdict in _VERDICTS:
        for value in _values(target, verdict):
            if value not in known:
                names = ", ".join(value.name for value in field.enum_type.values)
                raise CheckRefused(f"{field.enum_type.full_name} has no {value}: take one of {names[:200]}.")


def _text(field: FieldDescriptor, value: Any) -> set[str]:
    """Return how a value may be written in the options."""
    if field.enum_type is not None:
        name = field.enum_type.values_by_number.get(value)
        return {str(value)} | ({name.name} if name is not None else set())
    if isinstance(value, bool):
        return {"true" if value else "false"}
    return {str(value)}


def _read(target: CheckTarget, method: Method, question: Question, data: bytes) -> CheckAnswer:
    try:
        response = method.response.FromString(data)
    except DecodeError:
        return CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, "The bytes are not what the method describes.")
    if target.options.get("echo"):
        echo = _value(response, target.options["echo"])
        if echo is None or not echo & {question.key, question.message_id}:
            return CheckAnswer.unknown(
                CheckReason.OTHER_MESSAGE, f"It is about {sorted(echo or {'nothing'})[0][:128]!r}."
            )
    said = _value(response, target.options["verdict"])
    if said is None and _default(response, target.options["verdict"]) & set(_values(target, "UNKNOWN")):
        return CheckAnswer.unknown(CheckReason.ANSWERED, f"{target.options['verdict']} is at its default.")
    if said is None:
        return CheckAnswer.unknown(CheckReason.FIELD_ABSENT, f"{target.options['verdict']} is not set.")
    shown = "/".join(sorted(said))[:128]
    for verdict in _VERDICTS:
        if said & set(_values(target, verdict)):
            return CheckAnswer(Verdict[verdict], detail=f"{target.options['verdict']} = {shown}")
    return CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, f"{target.options['verdict']} = {shown} means nothing.")


def _value(response: Message, path: str) -> set[str] | None:
    """Return how the value at the end of a path may be written; None: it is not set."""
    current: Any = response
    for part in path.split("."):
        field = current.DESCRIPTOR.fields_by_name.get(part)
        if field is None or field.is_repeated:
            return None
        if field.has_presence and not current.HasField(part):
            return None
        current = getattr(current, part)
    if isinstance(current, Message) or (not field.has_presence and current == field.default_value):
        return None
    return _text(field, current)


def _default(response: Message, path: str) -> set[str]:
    """Return how the default of a field without presence is written, if the message around it is there: it may mean UNKNOWN."""
    around, _, name = path.rpartition(".")
    current: Any = response
    for part in around.split(".") if around else ():
        if not current.HasField(part):
            return set()
        current = getattr(current, part)
    field = current.DESCRIPTOR.fields_by_name.get(name)
    return set() if field is None or field.has_presence else _text(field, field.default_value)
