"""Points at which a process kills itself, by name: before or after a call of server, producer and consumer.

Armed by two variables of the environment: TMC_KILL_POINT is a name, TMC_KILL_AT says at which time it is reached (1: the
first). As a program, it arms itself and runs `tmc`:

usage: TMC_KILL_POINT=NAME python kill_points.py serve|consume ...
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class KillPoint:
    """target: MODULE:NAME of the call.  after: when it has returned, not before it begins."""

    target: str
    after: bool = False


def _around(name: str, target: str) -> dict[str, KillPoint]:
    return {f"before {name}": KillPoint(target), f"after {name}": KillPoint(target, after=True)}


SERVER: Mapping[str, KillPoint] = {
    **_around("prepare", "tmc_server.store.batch:prepare"),  # both inside the transaction
    **_around("decide", "tmc_server.store.batch:decide_each"),
    "after deliveries are inserted": KillPoint("tmc_server.store.messages:schedule", after=True),
    **_around("ack", "tmc_server.store.batch:consume"),
    "after commit": KillPoint("tmc_server.store.batch:ShardWriter._hand_over"),
    "before answers": KillPoint("tmc_server.store.batch:ShardWriter.run", after=True),
    **_around("hand-over", "tmc_server.delivery.rabbitmq:RabbitOutlet.deliver"),
    **_around("publish", "tmc_server.delivery.rabbitmq_lane:Lane.publish"),
    **_around("confirm", "tmc_server.delivery.rabbitmq:RabbitOutlet.answered"),
    **_around("claim", "tmc_server.store.due:claim_due"),  # both inside the transaction
    "after committed claim": KillPoint("tmc_server.store.due:SqlDueWork.claim", after=True),
    **_around("claim of checks", "tmc_server.store.due_checks:SqlDueChecks.claim"),
    **_around("asking", "tmc_server.checks.asking:CheckDispatcher.ask"),
    "before commit of verdicts": KillPoint("tmc_server.store.due_checks:record", after=True),
    "after commit of verdicts": KillPoint("tmc_server.store.due_checks:SqlDueChecks.record", after=True),
    **_around("leases", "tmc_server.store.leases:ShardLeases.run_once"),
    **_around("heartbeat", "tmc_server.store.nodes:NodeSlots.run_once"),
}
PRODUCER: Mapping[str, KillPoint] = {
    "before prepare is sent": KillPoint("tmc_client.producing.transaction:Transaction._write"),
    "after prepare": KillPoint("tmc_client.producing.transaction:Preparation.collect", after=True),
    "after the ledger row": KillPoint("tmc_client.producing.transaction:Transaction._write", after=True),
    "before commit": KillPoint("tmc_client.local.one_transaction:OneTransaction.commit"),
    "after commit": KillPoint("tmc_client.local.one_transaction:OneTransaction.commit", after=True),
    **_around("submit", "tmc_client.producing.transaction:Transaction._submit"),
    "while a batch is sent": KillPoint("tmc_client.connecting.sender:_Lane._call"),
    "after a batch was answered": KillPoint("tmc_client.connecting.sender:_Lane._call", after=True),
}
CONSUMER: Mapping[str, KillPoint] = {
    "on arrival": KillPoint("tmc_client.consuming.handling:Handling.arrive"),
    **_around("handler", "tmc_client.consuming.calling:Calling._invoke"),
    "after the inbox row": KillPoint("tmc_client.consuming.inbox:_Handling._note", after=True),
    "before commit": KillPoint("tmc_client.local.one_transaction:OneTransaction.commit"),
    "after commit": KillPoint("tmc_client.local.one_transaction:OneTransaction.commit", after=True),
    "before the ack to the center": KillPoint("tmc_client.consuming.handling:Handling._answer"),
    "after the ack to the center": KillPoint("tmc_client.consuming.handling:Handling._on_stored"),
    **_around("ack to the broker", "tmc_client.consuming.transports.rabbitmq:_Reader._send_acks"),
}


def arm(points: Mapping[str, KillPoint]) -> None:
    """Let this process kill itself as the environment says; without TMC_KILL_POINT nothing happens."""
    name = os.environ.get("TMC_KILL_POINT")
    if not name:
        return
    point, times = points[name], itertools.count(1)
    last = int(os.environ.get("TMC_KILL_AT", "1"))

    def reached() -> None:
        if next(times) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    module, _, path = point.target.partition(":")
    *owners, attribute = path.split(".")
    owner: Any = functools.reduce(getattr, owners, import_module(module))
    call: Callable[..., Any] = getattr(owner, attribute)

    @functools.wraps(call)
    def dying(*args: Any, **kwargs: Any) -> Any:
        if not point.after:
            reached()
        result = call(*args, **kwargs)
        if point.after:
            reached()
        return result

    setattr(owner, attribute, dying)


if __name__ == "__main__":
    import sys

    from tmc_cli import main

    arm({"serve": SERVER, "consume": CONSUMER}[sys.argv[1]])
    main()
