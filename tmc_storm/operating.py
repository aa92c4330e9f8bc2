"""The acts of the center's operators, and a book of those that change the books of the services."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from tmc_common.protocol import admin_pb2, types_pb2
from tmc_storm.plan import Ending, Fault, once
from tmc_storm.scene import Scene
from tmc_storm.shop import books

_REASON = "the storm"
_TRIED, _DONE, _CANCELLED = "operator.replays-tried", "operator.replays-done", "operator.cancelled"
_REPLAYED = (books.PAID, books.SHIPPED)
"""Topics without order keys: a replay comes after all others of its key."""


class ActBook:
    """A book of acts on single messages. folder: of the scene."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, name: str, *words: str) -> None:
        with (self._folder / name).open("a") as file:
            file.write(" ".join(words) + "\n")

    def lines(self, name: str) -> list[list[str]]:
        """Return the words of each line. Those of a writer that was killed may be empty."""
        path = self._folder / name
        return [line.split() for line in path.read_text().splitlines() if line.strip()] if path.exists() else []

    def replays(self, app: str) -> set[str]:
        """Return the keys of the messages that were sent again to this subscriber."""
        return {key for to, key in self.lines(_DONE) if to == app}

    def uncertain_replays(self, app: str) -> int:
        """Return how many more were tried, whose answer nobody got."""
        return self.lines(_TRIED).count([app]) - [to for to, _ in self.lines(_DONE)].count(app)

    @property
    def cancelled(self) -> set[str]:
        """Return the ids of the messages of which a delivery was given up."""
        return {message_id for (message_id,) in self.lines(_CANCELLED)}


def operator_acts(scene: Scene) -> Iterator[Fault]:
    """Yield the acts of operators."""
    call, acts = scene.operator.call, ActBook(scene.folder)

    def paused(dice: random.Random) -> Ending:
        app = dice.choice(sorted(scene.subscriptions))
        topic = dice.choice(scene.subscriptions[app])
        call("PauseSubscription", topic=topic, app=app, reason=_REASON)
        return lambda: call("ResumeSubscription", topic=topic, app=app, reason=_REASON)

    def topic_paused(dice: random.Random) -> Ending:
        topic = dice.choice(books.TOPICS)
        call("PauseTopic", name=topic, reason=_REASON)
        return lambda: call("ResumeTopic", name=topic, reason=_REASON)

    def rotated(dice: random.Random) -> None:
        app = dice.choice(sorted(books.SUBSCRIPTIONS))  # which verify signatures
        with _may_be_refused():  # while copies with the key before are about
            call("RotateDeliveryKey", topic=dice.choice(books.SUBSCRIPTIONS[app]), app=app)

    def drained(dice: random.Random) -> Ending:
        alive = sorted(server.incarnation for server in call("ListServers").servers if server.alive)
        if not alive:
            return lambda: None
        chosen = dice.choice(alive)
        with _may_be_refused():
            call("DrainServer", server=chosen, reason=_REASON)

        def undrain() -> None:
            with _may_be_refused():
                call("UndrainServer", server=chosen, reason=_REASON)

        return undrain

    def some(dice: random.Random, app: str, topic: str, state: types_pb2.ConsumptionState) -> Any:
        listed = call("ListConsumptions", topic=topic, app=app, state=state, newest_first=True, page_size=50)
        return dice.choice(listed.consumptions) if listed.consumptions else None

    def refused(dice: random.Random) -> Any:
        """A delivery that its own handler has refused for good; others that FAILED are findings and stay."""
        app = dice.choice(sorted(scene.subscriptions))
        found = some(dice, app, dice.choice(scene.subscriptions[app]), types_pb2.CONSUMPTION_STATE_FAILED)
        return found if found is not None and [found.message_id] in acts.lines(f"{app}.refused") else None

    def replayed(dice: random.Random) -> None:
        app = dice.choice(sorted(scene.subscriptions))
        topic = dice.choice([topic for topic in scene.subscriptions[app] if topic in _REPLAYED])
        found = some(dice, app, topic, types_pb2.CONSUMPTION_STATE_ACKED)
        if found is None:
            return
        acts.note(_TRIED, app)
        made = call("ReplayDelivery", message_id=found.message_id, app=app, reason=_REASON)  # repeated, it is the same
        acts.note(_DONE, app, made.key)

    def cancelled(dice: random.Random) -> None:
        found = refused(dice)
        if found is not None:
            acts.note(_CANCELLED, found.message_id)
            with _may_be_refused():
                call("CancelConsumption", message_id=found.message_id, app=found.app, reason=_REASON)

    def reactivated(dice: random.Random) -> None:
        found = refused(dice)
        if found is None:
            return
        groups = call("ListFailureGroups", topic=found.topic, app=found.app).groups
        same = [group.fingerprint for group in groups if group.error == found.last_error]
        if not same:
            return
        action = admin_pb2.BULK_ACTION_REACTIVATE
        wanted = admin_pb2.BulkFilter(action=action, topic=found.topic, app=found.app, fingerprint=same[0])
        with _may_be_refused():  # there are more of them by now
            dry_run = call("DryRunBulkJob", filter=wanted)
            agreed = {"dry_run": dry_run.dry_run, "count": dry_run.count}
            call("StartBulkJob", filter=wanted, reason=_REASON, hold_ms=0, **agreed)

    def act(what: str, part: str, begin: Callable[[random.Random], Ending], longest_s: float = 0.0) -> Fault:
        weight = 1.0 if longest_s else 0.3
        return Fault(
            kind=f"operator: {what}", part=f"operator of {part}", begin=begin, longest_s=longest_s, weight=weight
        )

    yield act("subscription paused", "subscriptions", paused, 3.0)
    yield act("topic paused", "topics", topic_paused, 3.0)
    yield act("delivery key rotated", "keys", once(rotated))
    if len(scene.servers) > 1:
        yield act("server drained", "servers", drained, 4.0)
    yield act("delivery replayed", "deliveries", once(replayed))
    yield act("failed delivery cancelled", "deliveries", once(cancelled))
    yield act("failed deliveries reactivated", "deliveries", once(reactivated))


@contextlib.contextmanager
def _may_be_refused() -> Iterator[None]:
    """Accept that the center does not do this now: a server has died since it was listed, or is the last one."""
    try:
        yield
    except grpc.RpcError as exc:
        if exc.code() not in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
            raise
