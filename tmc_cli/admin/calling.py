"""How an admin command calls its RPC and shows the answer."""

from __future__ import annotations

import base64
import functools
import inspect
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, cast

import grpc
import typer
from google.protobuf import json_format
from google.protobuf.message import Message

from tmc_cli import fail, say
from tmc_cli.admin.printing import listing
from tmc_common.admin_calls import admin_call
from tmc_common.enums import prefix_of
from tmc_common.printable import escaped
from tmc_common.protocol import types_pb2

Reason = Annotated[str, typer.Option(help="For the audit trail.")]
MaxAge = Annotated[int | None, typer.Option(help="No retry after this age; 0: no limit.")]
Jitter = Annotated[int | None, typer.Option(help="Add 0 to this percentage to each delay.")]
Growth = Annotated[bool | None, typer.Option("--exponential/--linear", help="How the delays between attempts grow.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON, for programs, also on a terminal.")]
Watch = Annotated[float, typer.Option("--watch", min=0, help="Refresh at this interval, in seconds.")]
PAGE_SIZE = 1_000


def ask(context: typer.Context, rpc: str, timeout_s: float = 10, **request: Any) -> Any:
    """Call an RPC. request: its fields. Returns: its answer; an error ends the command with exit code 1."""
    target, token = context.obj
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with target.channel() as channel:
        made, call = admin_call(channel, rpc)
        try:
            return call(made(**request), metadata=metadata, timeout=timeout_s)
        except grpc.RpcError as exc:
            fail(target.explain(exc), code=1)


def all_pages(context: typer.Context, rpc: str, timeout_s: float = 10, **request: Any) -> Any:
    """A whole listing in one answer."""
    whole = ask(context, rpc, timeout_s, page_size=PAGE_SIZE, **request)
    while whole.next_page_token:
        token = whole.next_page_token
        whole.ClearField("next_page_token")
        whole.MergeFrom(ask(context, rpc, timeout_s, page_size=PAGE_SIZE, page_token=token, **request))
    return whole


def watched(seconds: float, show_once: Callable[[], object]) -> None:
    """Show something once, or repeatedly at this interval until it returns True, or Ctrl-C; a terminal is cleared first."""
    try:
        while True:
            if seconds and sys.stdout.isatty():
                typer.echo("\033[H\033[2J", nl=False)
            if show_once() is True or not seconds:
                return
            sys.stdout.flush()
            time.sleep(seconds)
    except KeyboardInterrupt:
        return


WANTS_JSON: ContextVar[bool] = ContextVar("wants_json", default=False)


def with_json(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with the option --json."""
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(*arguments: Any, as_json: bool, **options: Any) -> None:
        WANTS_JSON.set(as_json)
        command(*arguments, **options)

    option = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)
    parameters = [*signature.parameters.values(), option]
    cast("Any", run).__signature__ = signature.replace(parameters=parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def for_people() -> bool:
    """Return whether standard output is a terminal, and JSON not asked for."""
    return sys.stdout.isatty() and not WANTS_JSON.get()


def show(answer: Message) -> None:
    """Print a listing as a table on a terminal, everything else as JSON."""
    lines = listing(answer) if for_people() else None
    if lines is not None:
        for line in lines:
            typer.echo(escaped(line))
        return
    shown = _as_dict(answer)
    if "body" in shown.get("message", {}):
        _add_text(shown["message"])
    typer.echo(escaped(json.dumps(shown, indent=2, ensure_ascii=False), keep="\n"))


def show_parts(parts: Mapping[str, Message]) -> None:
    """Print several answers as one JSON object."""
    shown = {name: _as_dict(answer) for name, answer in parts.items()}
    typer.echo(escaped(json.dumps(shown, indent=2, ensure_ascii=False), keep="\n"))


def _as_dict(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def _add_text(message: dict[str, Any]) -> None:
    """Add the body as text, if it is text, to the base64 of the wire."""
    try:
        message["body_text"] = base64.b64decode(message["body"]).decode()
    except UnicodeDecodeError:
        message["body_text"] = None


def show_changes(before: Message, after: Message) -> None:
    """Say on standard error what has changed."""
    for line in _differences(_flat(_as_dict(before)), _flat(_as_dict(after))) or ["Nothing changed."]:
        say(escaped(line))


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = [name for name in {**before, **after} if before.get(name) != after.get(name) and name != "effective_ms"]
    return [f"{name}: {before.get(name, 'unset')} -> {after.get(name, 'unset')}" for name in names]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Paths and values of an answer; the elements of a list go by their names."""
    if isinstance(value, list):
        value = {each.get("name", "") or "(unnamed)": each for each in value}
    if not isinstance(value, dict):
        return {name: value}
    parts = [_flat(inner, f"{name}.{key}" if name else str(key)) for key, inner in value.items()]
    return {path: inner for part in parts for path, inner in part.items()}


def change_policy(policy: types_pb2.RetryPolicy, *, exponential: bool | None, **limits: int | None) -> list[str]:
    """Set what was named. Returns: paths for an update mask."""
    kinds = {None: None, True: types_pb2.RETRY_KIND_EXPONENTIAL, False: types_pb2.RETRY_KIND_LINEAR}
    values = {"kind": kinds[exponential], **limits}
    named = {name: value for name, value in values.items() if value is not None}
    for name, value in named.items():
        setattr(policy, name, value)
    return [f"retry.{name}" for name in named]


def enum_names(enum: Any) -> Sequence[str]:
    """The values of an enum as a user types them."""
    return [each.name.removeprefix(prefix_of(enum)) for each in enum.values if each.number]


def enum_value(enum: Any, name: str) -> str:
    """The full name of an enum's value, from what a user types. Raises BadParameter: there is none."""
    typed = name.upper().replace("-", "_") or "UNSPECIFIED"
    found = enum.values_by_name.get(prefix_of(enum) + typed)
    if found is None:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(sorted(enum_names(enum)))}")
    return str(found.name)
