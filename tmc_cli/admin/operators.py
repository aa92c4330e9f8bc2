"""Admin commands about operators, and about the audit trail that they leave."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from tmc_cli import say
from tmc_cli.admin.calling import AsJson, Reason, all_pages, ask, call, enum_value, show
from tmc_cli.admin.text import duration_ms, table, when
from tmc_common.enums import name_of
from tmc_common.protocol import admin_pb2
from tmc_server.printable import escaped

_Name = Annotated[str, typer.Argument()]
_Role = Annotated[str, typer.Option(help="viewer, operator or admin.")]
_Topics = Annotated[
    list[str] | None,
    typer.Option("--topic", help="Limit the rights to topics that begin with this; several are allowed."),
]
_ReadsBodies = Annotated[
    bool | None, typer.Option("--reads-bodies/--no-bodies", help="May read the bodies of messages.")
]
_Identities = Annotated[
    list[str] | None,
    typer.Option(
        "--identity",
        help="Besides tokens: certificate:NAME or oidc:NAME; several are allowed, and replace those before.",
    ),
]
_Valid = Annotated[
    str,
    typer.Option(help="How long the token is valid, such as 90d; without it: for ever, or as long as yours."),
]


def who_am_i(context: typer.Context) -> None:
    """Show the operator that the token belongs to."""
    call(context, "WhoAmI", admin_pb2.WhoAmIRequest(), admin_pb2.Operator)


def register_operator(
    context: typer.Context,
    name: _Name,
    role: _Role,
    reason: Reason,
    topic: _Topics = None,
    reads_bodies: _ReadsBodies = None,
    valid: _Valid = "",
    identity: _Identities = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="The identities are enough.")] = False,
) -> None:
    """Register an operator; the token is in the answer, once."""
    request = admin_pb2.RegisterOperatorRequest(
        name=name,
        role=enum_value(admin_pb2.Role, "ROLE_", role),
        topics=topic or (),
        reads_bodies=bool(reads_bodies),
        valid_ms=duration_ms(valid),
        reason=reason,
        identities=identity or (),
        without_token=no_token,
    )
    answer: Any = ask(context, "RegisterOperator", request, admin_pb2.RegisterOperatorResponse)
    show(answer)
    if not (answer.token or no_token):
        say(f"{escaped(name)} is registered already: `tmc admin rotate-token {escaped(name)}` makes another token.")


def update_operator(
    context: typer.Context,
    name: _Name,
    reason: Reason,
    role: _Role = "",
    topic: _Topics = None,
    all_topics: Annotated[bool, typer.Option("--all-topics", help="Limit the rights to no topics.")] = False,
    reads_bodies: _ReadsBodies = None,
    identity: _Identities = None,
    no_identities: Annotated[bool, typer.Option("--no-identities", help="Tokens only.")] = False,
    no_token: Annotated[bool, typer.Option("--no-token", help="End the tokens: the identities are enough.")] = False,
) -> None:
    """Change what an operator may do; what is not named stays."""
    if topic and all_topics:
        raise typer.BadParameter("give --topic or --all-topics")
    if identity and no_identities:
        raise typer.BadParameter("give --identity or --no-identities")
    request = admin_pb2.UpdateOperatorRequest(
        name=name,
        reason=reason,
        topics=topic or (),
        reads_bodies=bool(reads_bodies),
        identities=identity or (),
        without_token=no_token,
    )
    if role:
        request.MergeFrom(admin_pb2.UpdateOperatorRequest(role=enum_value(admin_pb2.Role, "ROLE_", role)))
    named = {
        "role": bool(role),
        "topics": bool(topic) or all_topics,
        "reads_bodies": reads_bodies is not None,
        "identities": bool(identity) or no_identities,
    }
    request.update_mask.paths.extend(field for field, is_named in named.items() if is_named)
    call(context, "UpdateOperator", request, admin_pb2.Operator)


def rotate_token(
    context: typer.Context,
    reason: Reason,
    name: Annotated[str, typer.Argument(help="Without it: your own.")] = "",
    valid: _Valid = "",
    overlap: Annotated[str, typer.Option(help="How long the token before stays valid; 0s: not at all.")] = "1h",
) -> None:
    """Make another token for an operator; it is in the answer, once."""
    request = admin_pb2.RotateOperatorTokenRequest(
        name=name, valid_ms=duration_ms(valid), overlap_ms=duration_ms(overlap), reason=reason
    )
    call(context, "RotateOperatorToken", request, admin_pb2.RotateOperatorTokenResponse)


def remove_operator(context: typer.Context, name: _Name, reason: Reason) -> None:
    """Remove an operator; the tokens are refused from then on."""
    request = admin_pb2.RemoveOperatorRequest(name=name, reason=reason)
    call(context, "RemoveOperator", request, admin_pb2.RemoveOperatorResponse)


def list_operators(context: typer.Context, as_json: AsJson = False) -> None:
    """List operators, with their rights and when their tokens expire."""
    answer: Any = all_pages(context, "ListOperators", admin_pb2.ListOperatorsRequest(), admin_pb2.ListOperatorsResponse)
    if as_json:
        show(answer)
        return
    rows = [
        (
            each.name,
            name_of(admin_pb2.Role.DESCRIPTOR, each.role, "ROLE_").lower(),
            " ".join(each.topics) or "all",
            "yes" if each.reads_bodies else "no",
            _token_ends(each.expires_ms),
            " ".join(each.identities),
        )
        for each in answer.operators
    ]
    for line in table(("OPERATOR", "ROLE", "TOPICS", "BODIES", "TOKEN EXPIRES", "IDENTITIES"), rows):
        typer.echo(escaped(line))


def _token_ends(ms: int) -> str:
    if ms and ms <= time.time() * 1000:
        return "expired"
    return when(ms) or "never"


def verify_audit(context: typer.Context, as_json: AsJson = False) -> None:
    """Verify the seals of the audit trail. Exit code 1: a row was changed or removed."""
    answer: Any = ask(
        context, "VerifyAudit", admin_pb2.VerifyAuditRequest(), admin_pb2.VerifyAuditResponse, timeout=600
    )
    if as_json:
        show(answer)
    for each in answer.databases:
        if not as_json:
            without = f" ({each.unkeyed} of them sealed without a secret)" if each.unkeyed else ""
            rows = f"{each.verified} rows verified{without}, {each.unsealed} not sealed yet"
            typer.echo(escaped(f"{each.database}: {rows}"))
            typer.echo(f"    last seal: {each.head_number} {each.head}" if each.head else "    no seal")
        if each.fault:
            say(escaped(f"BAD  {each.database}: {each.fault}"))
    if any(each.fault for each in answer.databases):
        raise typer.Exit(1)
