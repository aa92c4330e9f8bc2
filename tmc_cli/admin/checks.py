"""Configure and try how undecided messages are checked."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tmc_cli import fail
from tmc_cli.admin.calling import Growth, Jitter, MaxAge, ask, change_policy, show, show_changes
from tmc_common.protocol import admin_pb2, types_pb2


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
    before = ask(context, "GetTopicCheck", topic=topic)
    targets = {target.name: target for target in before.targets}
    settings = {
        "address": address,
        "deadline_ms": deadline_ms,
        "concurrency": concurrency,
        "batch": batch,
        "tls": tls,
    }
    named = {field: value for field, value in settings.items() if value is not None}
    mask: list[str] = []
    if kind or named or option:
        options = dict(_pair(text) for text in option or ())
        targets[name] = _changed_target(targets.get(name), name, kind, named, options)
        mask.append("targets")
    gone = set(remove or ()) | ({each for each in targets if each != name} if replace else set())
    unknown = gone - set(targets)
    if unknown:
        fail(f"The topic has no target {sorted(unknown)[0]!r}: its targets are {sorted(targets)}.")
    retry = types_pb2.RetryPolicy()
    retry.CopyFrom(before.retry)
    mask += change_policy(
        retry,
        exponential=exponential,
        interval_ms=interval_ms,
        max_retry=max_retry,
        cap_ms=cap_ms,
        max_age_ms=max_age_ms,
        jitter_percent=jitter_percent,
    )
    after = ask(
        context,
        "SetTopicCheck",
        topic=topic,
        targets=[targets[name]] if "targets" in mask else [],
        removed_targets=sorted(gone),
        retry=retry,
        untried=untried,
        update_mask={"paths": mask},
    )
    show_changes(before, after)
    show(after)


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
    show(ask(context, "TryCheck", timeout_s=300, message_id=message_id, target=target))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value
