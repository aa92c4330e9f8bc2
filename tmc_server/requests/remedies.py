"""The commands that help, complete but for the reason, so that an operator can copy them."""

from __future__ import annotations

from collections.abc import Sequence

from tmc_server.requests.explanations import Why

_OF_SUBSCRIPTION = "{topic} {app} --tag {tag}"
_DELIVER_NOW = "deliver-now {message} {app} --tag {tag} --reason '...'"
_COMMANDS: dict[Why, Sequence[str]] = {
    Why.CHECK_SCHEDULED: ["check-now {message}"],
    Why.PRODUCER_UNREACHABLE: ["get-check {topic}", "check-now {message}"],
    Why.CHECK_TARGET_WRONG: ["get-check {topic}", "check-now {message}"],
    Why.PRODUCER_RESTS: ["check-now {message}"],
    Why.CHECK_BROKEN: ["check-now {message}"],
    Why.CHECK_FAILED: [
        "reactivate-check {message} --reason '...'",
        "decide {message} COMMIT --reason '...'",
        "decide {message} ROLLBACK --reason '...'",
    ],
    Why.DELAYED: [_DELIVER_NOW],
    Why.RETRY_SCHEDULED: [_DELIVER_NOW],
    Why.TOPIC_PAUSED: ["resume-topic {topic} --reason '...'"],
    Why.SUBSCRIPTION_PAUSED: [f"resume-subscription {_OF_SUBSCRIPTION} --reason '...'"],
    Why.BLOCKED: [
        "reactivate {waits_for} {app} --tag {tag} --reason '...'",
        "cancel {waits_for} {app} --tag {tag} --reason '...'",
    ],
    Why.TO_BE_RELEASED: [f"repair-order {_OF_SUBSCRIPTION} --reason '...'"],
    Why.FAILED: [
        "reactivate {message} {app} --tag {tag} --reason '...'",
        "cancel {message} {app} --tag {tag} --reason '...'",
    ],
}


def commands_for(why: Why, **names: str) -> Sequence[str]:
    """Return commands of `tmc admin`; none where nothing has to be done, or nothing that a command does.

    names: of the message, its topic, the subscriber's app and tag (empty: there is none), and waits_for, see `Explanation`.
    """
    return [f"tmc admin {command.format(**names)}" for command in _COMMANDS.get(why, ())]
