"""Operators, and the audit trail that they leave, as people read them."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from tmc_cli import say
from tmc_cli.admin.calling import Reason, ask, enum_value, show
from tmc_cli.admin.printing import enum, moment, printed
from tmc_cli.admin.text import when
from tmc_common.printable import escaped
from tmc_common.protocol import admin_pb2

_NEARLY_MS = 60_000
print_operators = printed(
    "operators",
    {
        "OPERATOR": "name",
        "ROLE": lambda row: enum("role")(row).lower(),
        "TOPICS": lambda row: " ".join(row.topics) or "all",
        "BODIES": lambda row: "yes" if row.reads_bodies else "no",
        "TOKEN EXPIRES": lambda row: _token_ends(row.expires_ms),
        "IDENTITIES": lambda row: " ".join(row.identities),
    },
)
print_audit = printed(
    "entries",
    {
        "TIME": moment("at_ms"),
        "OPERATOR": "actor",
        "FROM": "origin",
        "ACTION": "action",
        "SUBJECT": "subject",
        "REASON": "reason",
        "CHANGE": lambda row: row.change.replace("\n", "; "),
    },
)


def update_operator(
    context: typer.Context,
    name: str,
    reason: Reason,
    role: Annotated[str, typer.Option(help="VIEWER, OPERATOR, ADMIN.")] = "",
    topic: Annotated[
        list[str] | None, typer.Option(help="Limit the rights to topics that begin with this; several are allowed.")
    ] = None,
    all_topics: Annotated[bool, typer.Option("--all-topics", help="Limit the rights to no topics.")] = False,
    reads_bodies: Annotated[
        bool | None, typer.Option("--reads-bodies/--no-bodies", help="May read the bodies of messages.")
    ] = None,
    identity: Annotated[
        list[str] | None, typer.Option(help="certificate:NAME or oidc:NAME; replaces those before.")
    ] = None,
    no_identities: Annotated[bool, typer.Option("--no-identities", help="Tokens only.")] = False,
    no_token: Annotated[bool, typer.Option("--no-token", help="End the tokens: the identities are enough.")] = False,
) -> None:
    """Change what an operator may do; what is not named stays."""
    if topic and all_topics:
        raise typer.BadParameter("give --topic or --all-topics")
    if identity and no_identities:
        raise typer.BadParameter("give --identity or --no-identities")
    named = {
        "role": enum_value(admin_pb2.Role.DESCRIPTOR, role) if role else None,
        "topics": topic or ([] if all_topics else None),
        "reads_bodies": reads_bodies,
        "identities": identity or ([] if no_identities else None),
    }
    changes: dict[str, Any] = {field: value for field, value in named.items() if value is not None}
    paths = {"paths": list(changes)}
    show(ask(context, "UpdateOperator", name=name, reason=reason, without_token=no_token, update_mask=paths, **changes))


def say_registered_already(answer: Any, request: Any) -> None:
    """Say, after an answer without a token, how to get one."""
    if not (answer.token or request["without_token"]):
        name = escaped(request["name"])
        say(f"{name} is registered already: `tmc admin rotate-token {name}` makes another token.")


def say_if_shorter(answer: Any, request: Any) -> None:
    """Say when the new token does not last as long as was asked for."""
    ends_ms = 0 if request["name"] else answer.operator.expires_ms  # an administrator's word for others counts
    if ends_ms and (not request["valid_ms"] or ends_ms < time.time() * 1000 + request["valid_ms"] - _NEARLY_MS):
        say(
            f"It expires {when(ends_ms)}, like the token before: one's own token cannot be prolonged, an administrator can."
        )


def _token_ends(ms: int) -> str:
    if ms and ms <= time.time() * 1000:
        return "expired"
    return when(ms) or "never"


def print_seals(answer: Any) -> None:
    for each in answer.databases:
        without = f" ({each.unkeyed} of them sealed without a secret)" if each.unkeyed else ""
        rows = f"{each.verified} rows verified{without}, {each.unsealed} not sealed yet"
        typer.echo(escaped(f"{each.database}: {rows}"))
        typer.echo(f"    last seal: {each.head_number} {each.head}" if each.head else "    no seal")


def fail_if_broken(answer: Any, _request: Any) -> None:
    """End with exit code 1 if a row of the audit trail was changed or removed."""
    faults = [each for each in answer.databases if each.fault]
    for each in faults:
        say(escaped(f"BAD  {each.database}: {each.fault}"))
    if faults:
        raise typer.Exit(1)
