"""A command of `tmc admin` as a row: its name, its RPC, its sentence, and the fields that are given by position.

The rest follows from the descriptor of the request: each field is an option of its type.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import GenericAlias
from typing import Annotated, Any, cast

import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tmc_cli.admin.calling import WANTS_JSON, Watch, all_pages, ask, enum_names, enum_value, show, watched
from tmc_cli.admin.calling import show_changes as show_changes_since
from tmc_cli.admin.text import duration_ms
from tmc_common.admin_calls import SERVICE

_NAMES = {
    "for_ms": "for",
    "identities": "identity",
    "older_than_ms": "older-than",
    "overlap_ms": "overlap",
    "pending_only": "pending",
    "topics": "topic",
    "unsigned_copies": "unsigned",
    "valid_ms": "valid",
    "without_body": "no-body",
    "without_token": "no-token",
}
_HELP = {
    "drop_newest": "Drop all keys of the environment.",
    "drop_previous": "Reject copies signed with the previous key.",
    "dry_run": "Only count them.",
    "failures_only": "Only deliveries that were not changed.",
    "fingerprint": "FAILED with this error.",
    "for_ms": "How long: 90s, 10m, 2h, 1d; at most 30d.",
    "from_ms": "Messages made at this time or later.",
    "identities": "Besides tokens: certificate:NAME or oidc:NAME; several are allowed.",
    "newest_first": "Instead of the oldest first.",
    "older_than_ms": "Only messages of at least this age: 90s, 10m, 2h, 1d.",
    "ordered": "Each message has an order key, and messages of one key are delivered one after another (docs/order.md).",
    "overlap_ms": "How long the token before stays valid; 0s: not at all.",
    "pending_only": "Only those that can be approved now.",
    "reads_bodies": "May read the bodies of messages.",
    "reason": "For the audit trail.",
    "replace_newest": "Replace the newest one, whose answer was lost.",
    "resolved": "Also those whose cause is gone.",
    "since": "Done in this time: 90s, 10m, 2h, 1d.",
    "subject": "What it was done to, or its first words.",
    "text": "An id, a key, or the beginning of a key with * behind it.",
    "to_ms": "Messages made before this time.",
    "topics": "Limit the rights to topics that begin with this; several are allowed.",
    "unsigned": "Take unsigned messages: the broker's permissions are the only guard.",
    "unsigned_copies": "Copies in queues are not signed (docs/signatures.md).",
    "valid_ms": "How long the token is valid, such as 90d; without it: for ever, or as long as yours.",
    "without_body": "Reading bodies is a right, and audited.",
    "without_token": "The identities are enough.",
}
_PAGE = ("page_size", "page_token")
_NO_DEFAULT = inspect.Parameter.empty


@dataclass(frozen=True)
class Rpc:
    """arguments: fields by position; what has a "?" may be left out.  required: options that may not, besides the reason.

    name: "": that of the RPC.  names, defaults: of options, by field.  page_size: of a page; 0: the whole listing is shown.
    prints: how people see the answer.  before: reads what it is compared with.  after: called with answer and request.
    """

    rpc: str
    sentence: str
    arguments: str = ""
    _: KW_ONLY
    name: str = ""
    required: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    helps: Mapping[str, str] = field(default_factory=dict)
    page_size: int = 0
    prints: Callable[[Any], object] | None = None
    before: Callable[[typer.Context, Mapping[str, Any]], Message | None] | None = None
    after: Callable[[Any, Mapping[str, Any]], object] | None = None
    can_watch: bool = False
    timeout_s: float = 10

    @property
    def words(self) -> str:
        """The name as it is typed."""
        return self.name or re.sub("(?<!^)(?=[A-Z])", "-", self.rpc).lower()

    def command(self) -> Callable[..., None]:
        """The function that typer calls."""
        fields = [_Option(self, each) for each in SERVICE.methods_by_name[self.rpc].input_type.fields]
        given = sorted((each for each in fields if each.is_given), key=lambda each: each.position)

        def run(context: typer.Context, watch: float = 0, **values: Any) -> None:
            request = {each.field.name: each.value(values[each.field.name]) for each in given}
            watched(watch, lambda: self._run(context, request))

        parameters = [_keyword("context", typer.Context), *(each.parameter() for each in given)]
        if self.can_watch:
            parameters.append(_keyword("watch", Watch, 0))
        run.__doc__ = self.sentence
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        cast("Any", run).__signature__ = inspect.Signature(parameters)
        return run

    def _run(self, context: typer.Context, request: Mapping[str, Any]) -> None:
        before = self.before(context, request) if self.before is not None else None
        lists = "next_page_token" in SERVICE.methods_by_name[self.rpc].output_type.fields_by_name
        call = all_pages if lists and not self.page_size else ask
        answer = call(context, self.rpc, timeout_s=self.timeout_s, **request)
        if before is not None:
            show_changes_since(before, answer)
        if self.prints is None or WANTS_JSON.get():
            show(answer)
        else:
            self.prints(answer)
        if self.after is not None:
            self.after(answer, request)


@dataclass(frozen=True)
class _Option:
    """A field of a request, as an option or argument of its command."""

    row: Rpc
    field: Any

    @property
    def is_given(self) -> bool:
        return self.field.message_type is None and (self.row.page_size > 0 or self.field.name not in _PAGE)

    @property
    def position(self) -> int:
        """Options come after all arguments."""
        words = self.row.arguments.replace("?", "").split()
        return words.index(self.field.name) if self.field.name in words else len(words)

    @property
    def _name(self) -> str:
        default = _NAMES.get(self.field.name, self.field.name.replace("_", "-"))
        return self.row.names.get(self.field.name, default)

    @property
    def _is_a_time(self) -> bool:
        """Return whether it is written as 90s, 10m, 2h or 1d."""
        return self.field.name.endswith("_ms") and not self._name.endswith("-ms")

    def parameter(self) -> inspect.Parameter:
        name, arguments = self.field.name, self.row.arguments.split()
        if name in arguments or f"{name}?" in arguments:
            metavar = self._name.replace("-", "_").upper()
            default = _NO_DEFAULT if name in arguments else self._default
            declared: Any = typer.Argument(help=self._help, metavar=metavar)
        else:
            default = _NO_DEFAULT if name in (*self.row.required.split(), "reason") else self._default
            no = f"/--no-{self._name}" if self.field.has_presence and self._type is bool else ""
            declared = typer.Option(f"--{self._name}{no}", help=self._help)
        kind = GenericAlias(list, (self._type,)) | None if self.field.is_repeated else self._type
        return _keyword(name, Annotated[kind | None if self.field.has_presence else kind, declared], default)

    @property
    def _type(self) -> Any:
        if self.field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_ENUM) or self._is_a_time:
            return str
        return bool if self.field.type == FieldDescriptor.TYPE_BOOL else int

    @property
    def _help(self) -> str | None:
        known = self.row.helps.get(self.field.name) or _HELP.get(self._name) or _HELP.get(self.field.name)
        return f"{', '.join(enum_names(self.field.enum_type))}." if self.field.enum_type and not known else known

    @property
    def _default(self) -> Any:
        if self.field.name == "page_size":
            return self.row.page_size
        if self.field.name in self.row.defaults:
            return self.row.defaults[self.field.name]
        if self.field.has_presence or self.field.is_repeated:
            return None
        return self._type()

    def value(self, given: Any) -> Any:
        if self.field.enum_type is not None:
            return enum_value(self.field.enum_type, given)
        if not self._is_a_time:
            return given
        ms = duration_ms(given)
        return round(time.time() * 1000) - ms if ms and self._name == "since" else ms


def _keyword(name: str, annotation: Any, default: Any = _NO_DEFAULT) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
