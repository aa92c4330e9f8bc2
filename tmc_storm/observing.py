"""The observers: they read the books of the services, past all proxies, and ask an operator what waits for humans."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tmc_common.protocol import types_pb2
from tmc_storm.cast import database_of
from tmc_storm.judging import Answer, Books, Effect, Sent
from tmc_storm.operating import ActBook
from tmc_storm.scene import Scene
from tmc_storm.services.program import Program
from tmc_storm.shop import books

SAMPLE_S = 0.5
_USAGE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Progress at one moment. at_s: from the beginning.  orders, effects: so far, of all producers and of all subscribers,
    with a few that were rolled back.
    """

    at_s: float
    orders: int
    effects: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The resources of a process at one moment. at_s: from the beginning.  handles: open files and connections."""

    at_s: float
    program: str
    pid: int
    rss_mb: float
    threads: int
    handles: int


class Observer:
    """Reads what the services wrote down."""

    def __init__(self, scene: Scene, since_ms: int) -> None:
        """since_ms: of the center's clock: what was made before is of an earlier storm."""
        self._scene = scene
        self._since_ms = since_ms
        self._engines = {
            name: sa.create_engine(scene.business_url(name, direct=True), pool_size=1, pool_pre_ping=True)
            for name in map(database_of, (books.ORDERS_APP, *scene.subscriptions))
        }

    def progress(self) -> tuple[int, int]:
        """Return about how many orders and effects there are. Raises sqlalchemy.exc.SQLAlchemyError: their database is away.

        To count a hundred thousand rows every second would cost a tenth of the machine.
        """
        effects = sum(self._last(database_of(app), books.effect) for app in self._scene.subscriptions)
        return self.last_order(), effects

    def last_order(self) -> int:
        """Return the number of the newest order."""
        return self._last("orders", books.sent)

    def orders_after(self, number: int) -> list[str]:
        """Return the keys of newer orders."""
        column = books.sent.c
        return [key for (key,) in self._rows("orders", sa.select(column.message_key).where(column.id > number))]

    def _last(self, name: str, table: sa.Table) -> int:
        return int(self._rows(name, sa.select(sa.func.coalesce(sa.func.max(table.c.id), 0)))[0][0])

    def _rows(self, name: str, query: sa.Select[Any]) -> Sequence[Any]:
        with self._engines[name].connect() as connection:
            return connection.execute(query).all()

    def books(self) -> Books:
        """Return all the books."""
        sent, begun, acts = books.sent.c, books.begun.c, ActBook(self._scene.folder)
        # First what came of it, then what was begun: what happens between the two looks is not settled, and no finding.
        effects = {app: self._effects(app) for app in self._scene.subscriptions}
        failed = self._consumptions(types_pb2.CONSUMPTION_STATE_FAILED)
        opened = [
            message_id
            for state in (types_pb2.CONSUMPTION_STATE_SCHEDULED, types_pb2.CONSUMPTION_STATE_WAITING)
            for message_ids in self._consumptions(state).values()
            for message_id in message_ids
        ]
        return Books(
            sent={
                key: Sent(topic=topic, is_refused=bool(is_refused), due_ms=due_ms)
                for key, topic, is_refused, due_ms in self._rows(
                    "orders", sa.select(sent.message_key, sent.topic, sent.is_refused, sent.due_ms)
                )
            },
            begun={key for (key,) in self._rows("orders", sa.select(begun.message_key))},
            effects=effects,
            topics=self._scene.subscriptions,
            refused={app: [line[0] for line in acts.lines(f"{app}.refused")] for app in self._scene.subscriptions},
            replays={app: acts.replays(app) for app in self._scene.subscriptions},
            uncertain_replays={app: acts.uncertain_replays(app) for app in self._scene.subscriptions},
            cancelled=acts.cancelled,
            failed=failed,
            open=opened,
            undecided=self._messages(types_pb2.MESSAGE_STATE_PREPARED),
            check_failed=self._messages(types_pb2.MESSAGE_STATE_CHECK_FAILED),
            answers=self._answers(),
        )

    def _consumptions(self, state: types_pb2.ConsumptionState) -> dict[str, set[str]]:
        """Return the ids of the messages whose deliveries are in this state, by subscriber."""
        found: dict[str, set[str]] = {app: set() for app in self._scene.subscriptions}
        for topic in books.TOPICS:
            for page in self._scene.operator.pages(
                "ListConsumptions", topic=topic, state=state, from_ms=self._since_ms
            ):
                for one in page.consumptions:
                    found[one.app].add(one.message_id)
        return found

    def _messages(self, state: types_pb2.MessageState) -> list[str]:
        """Return the ids of the messages in this state."""
        return [
            message.message_id
            for topic in books.TOPICS
            for page in self._scene.operator.pages("ListMessages", topic=topic, state=state, from_ms=self._since_ms)
            for message in page.messages
        ]

    def _effects(self, app: str) -> list[Effect]:
        column = books.effect.c
        query = sa.select(books.effect).order_by(column.id)
        return [
            Effect(
                key=row.message_key,
                order_key=row.order_key,
                number=row.number,
                at_ms=row.at_ms,
                is_intact=bool(row.is_intact),
            )
            for row in self._rows(database_of(app), query)
        ]

    def _answers(self) -> list[Answer]:
        found = []
        for path in sorted(self._scene.folder.glob("*.answers")):
            for line in path.read_text().splitlines():
                try:
                    noted = json.loads(line)
                except ValueError:
                    continue  # its writer was killed
                found.append(Answer(key=noted["key"], error=noted["error"], text=noted["text"]))
        return found


class Progress:
    """Takes a sample twice a second, and one of what the programs hold every ten seconds, in a thread of its own."""

    def __init__(self, observer: Observer, programs: Sequence[Program]) -> None:
        self._observer = observer
        self._programs = programs
        self._began = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self.samples: list[Sample] = []
        self.usages: list[Usage] = []

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began

    def _run(self) -> None:
        next_usage_s = 0.0
        while not self._stopped.wait(SAMPLE_S):
            if self.now_s >= next_usage_s:
                next_usage_s = self.now_s + _USAGE_S
                self.usages += [
                    usage for program in self._programs if (usage := _usage(self.now_s, program)) is not None
                ]
            try:
                orders, effects = self._observer.progress()
            except sa.exc.SQLAlchemyError:
                continue  # part of the storm
            self.samples.append(Sample(at_s=round(self.now_s, 2), orders=orders, effects=effects))


def _usage(at_s: float, program: Program) -> Usage | None:
    """Return what a program holds now; None, it does not run."""
    process = Path(f"/proc/{program.pid}")
    try:
        status = process.joinpath("status").read_text()
        handles = len(list(process.joinpath("fd").iterdir()))
        rss_kb, threads = (int(status.partition(f"{name}:")[2].split()[0]) for name in ("VmRSS", "Threads"))
    except (OSError, IndexError):  # it has ended, or is ending
        return None
    return Usage(
        at_s=round(at_s, 1),
        program=program.name,
        pid=program.pid,
        rss_mb=round(rss_kb / 1024, 1),
        threads=threads,
        handles=handles,
    )
