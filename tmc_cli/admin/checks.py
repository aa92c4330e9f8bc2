"""Admin commands about checks and undecided messages."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tmc_cli import fail
from tmc_cli.admin.calling import Growth, Jitter, MaxAge, Reason, ask, call, change, change_policy, enum_value
from tmc_common.protocol import admin_pb2, message_pb2, types_pb2


def set_check(
    context: typer.Context,
    topic: str,
    kind: str = "",
    name: str = "",
    address: str | None = None,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, repeatable: path, batch, method, ...; NAME= removes it.")
    ] = None,
    deadline_ms: int | None = None,
    concurrency: int | None = None,
    batch: int | None = None,
    tls: bool | None = None,
    interval_ms: int | None = None,
    max_retry: int | None = None,
    cap_ms: int | None = None,
    max_age_ms: MaxAge = None,
    jitter_percent: Jitter = None,
    exponential: Growth = None,
    untried: Annotated[bool, typer.Option(help="Store it without trying it.")] = False,
    remove: Annotated[list[str] | None, typer.Option(help="Name of a target to remove, repeatable.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Remove the topic's other targets.")] = False,
) -> None:
    """Configure how undecided messages of a topic are checked; what is not named stays. Tried before it is stored."""
    before = ask(context, "GetTopicCheck", admin_pb2.GetTopicCheckRequest(topic=topic), admin_pb2.TopicCheck)
    targets = {target.name: target for target in before.targets}
    settings = {
        "address": address,
        "deadline_ms": deadline_ms,
        "concurrency": concurrency,
        "batch": batch,
        "tls": tls,
    }
    named = {field: value for field, value in settings.items() if value is not None}
    request = admin_pb2.SetTopicCheckRequest(topic=topic, untried=untried)
    if kind or named or option:
        targets[name] = _changed_target(
            targets.get(name), name, kind, named, dict(_pair(text) for text in option or ())
        )
        request.update_mask.paths.append("targets")
    gone = set(remove or ()) | ({each for each in targets if each != name} if replace else set())
    unknown = gone - set(targets)
    if unknown:
        fail(f"The topic has no target {sorted(unknown)[0]!r}: its targets are {sorted(targets)}.")
    if "targets" in request.update_mask.paths:
        request.targets.append(targets[name])
    request.removed_targets.extend(sorted(gone))
    request.retry.CopyFrom(before.retry)
    policy = change_policy(
        request.retry,
        exponential=exponential,
        interval_ms=interval_ms,
        max_retry=max_retry,
        cap_ms=cap_ms,
        max_age_ms=max_age_ms,
        jitter_percent=jitter_percent,
    )
    request.update_mask.paths.extend(policy)
    change(context, "SetTopicCheck", request, before, admin_pb2.TopicCheck)


def _changed_target(
    before: admin_pb2.CheckTarget | None, name: str, kind: str, named: dict[str, Any], options: dict[str, str]
) -> admin_pb2.CheckTarget:
    target = admin_pb2.CheckTarget(name=name)
    if before is not None:
        target.CopyFrom(before)
    elif not kind:
        fail(f"The topic has no target {name!r} yet: give --kind, see docs/checks.md.")
    if kind and kind != target.kind:
        target.kind = kind
        target.options.clear()  # each kind has options of its own
    for field, value in named.items():
        setattr(target, field, value)
    for option, value in options.items():
        if value:
            target.options[option] = value
        else:
            target.options.pop(option, None)
    return target


def get_check(context: typer.Context, topic: str) -> None:
    """Show how undecided messages of a topic are checked."""
    call(context, "GetTopicCheck", admin_pb2.GetTopicCheckRequest(topic=topic), admin_pb2.TopicCheck)


def check_now(context: typer.Context, message_id: str) -> None:
    """Check one undecided message now; shows the target, the request, the answer, the verdict and the duration."""
    call(context, "CheckNow", admin_pb2.CheckNowRequest(message_id=message_id), admin_pb2.CheckNowResponse, timeout=150)


def try_check(
    context: typer.Context,
    message_id: str,
    kind: str,
    address: str = "",
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, repeatable: path, batch, method, ...")] = None,
    deadline_ms: int | None = None,
    tls: bool = False,
) -> None:
    """Ask a target about one message, and the stored target too; nothing is stored or decided."""
    target = admin_pb2.CheckTarget(
        kind=kind, address=address, options=dict(_pair(text) for text in option or ()), deadline_ms=deadline_ms, tls=tls
    )
    request = admin_pb2.TryCheckRequest(message_id=message_id, target=target)
    call(context, "TryCheck", request, admin_pb2.TryCheckResponse, timeout=300)


def reactivate_check(context: typer.Context, message_id: str, reason: Reason) -> None:
    """Check a CHECK_FAILED message again."""
    request = admin_pb2.ReactivateCheckRequest(message_id=message_id, reason=reason)
    call(context, "ReactivateCheck", request, message_pb2.Message)


def reactivate_checks(
    context: typer.Context,
    topic: str,
    reason: Reason,
    from_ms: int = 0,
    to_ms: int = 0,
    limit: int | None = None,
    dry_run: bool = False,
) -> None:
    """Check all CHECK_FAILED messages of a topic again. --dry-run only counts them."""
    request = admin_pb2.ReactivateChecksRequest(
        topic=topic, from_ms=from_ms, to_ms=to_ms, limit=limit, dry_run=dry_run, reason=reason
    )
    call(context, "ReactivateChecks", request, admin_pb2.ReactivateChecksResponse, timeout=150)


def decide(
    context: typer.Context,
    message_id: str,
    verdict: Annotated[str, typer.Argument(help="COMMIT or ROLLBACK.")],
    reason: Reason,
) -> None:
    """Decide an undecided message by hand."""
    request = admin_pb2.DecideMessageRequest(
        message_id=message_id, verdict=enum_value(types_pb2.Verdict, "VERDICT_", verdict), reason=reason
    )
    call(context, "DecideMessage", request, message_pb2.Message)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value
