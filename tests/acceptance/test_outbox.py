"""The outbox alone: producers and three competing relays over RabbitMQ, killed at random; nothing is lost or invented."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.dose import LONG
from tests.support.outbox_shop import TOPIC, make_tables, purchase
from tmc_client.outbox.store import OutboxStore
from tmc_client.tables import metadata
from tmc_storm.eventually import eventually
from tmc_storm.services.rabbitmq import RabbitMQ

pytestmark = pytest.mark.services
TMC = str(Path(sys.executable).parent / "tmc")
_KILLS = 200 if LONG else 16


class Processes:
    """Producers and relays, each started again when it is killed."""

    def __init__(self, database: str, broker: str) -> None:
        self._environment = os.environ | {
            "OUTBOX_DATABASE": database,
            "OUTBOX_BROKER": broker,
            "TMC_LOG_LEVEL": "error",
        }
        relay = [TMC, "outbox", "run", "tests.support.outbox_shop:outbox"]
        self._commands = [
            *([sys.executable, "-m", "tests.support.outbox_shop", name, "6"] for name in ("one", "two")),
            *(list(relay) for _ in range(3)),
        ]
        self.running = [self._start(command) for command in self._commands]

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=self._environment, start_new_session=True)

    def kill(self, place: int) -> None:
        self.running[place].send_signal(signal.SIGKILL)
        self.running[place].wait()
        self.running[place] = self._start(self._commands[place])

    def stop(self, places: range) -> None:
        for place in places:
            self.running[place].send_signal(signal.SIGKILL if place < 2 else signal.SIGTERM)
        for place in places:
            self.running[place].wait(30)


@pytest.fixture(params=[pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in ("mariadb", "postgresql")])
def database(request: pytest.FixtureRequest) -> Iterator[sa.Engine]:
    engine = sa.create_engine(request.getfixturevalue(request.param).create("tmc_outbox_kills"))
    metadata.drop_all(engine)
    purchase.metadata.drop_all(engine)
    make_tables(engine)
    yield engine
    engine.dispose()


def _received(rabbitmq: RabbitMQ) -> list[Any]:
    connection = rabbitmq.connect()
    channel = connection.channel()
    found = []
    while (message := channel.basic_get(TOPIC, auto_ack=True))[0] is not None:
        found.append(message[1])
    connection.close()
    return found


@pytest.mark.takes_turns("outbox")
def test_nothing_is_lost_or_invented_and_order_holds_under_kills(
    database: sa.Engine, rabbitmq: RabbitMQ, note: Callable[[str], None]
) -> None:
    connection = rabbitmq.connect()
    channel = connection.channel()
    channel.queue_declare(TOPIC, durable=True)
    channel.queue_purge(TOPIC)
    connection.close()
    processes = Processes(database.url.render_as_string(hide_password=False), rabbitmq.url)
    store, dice = OutboxStore(database), random.Random(7)

    def purchases() -> int:
        with database.connect() as reading:
            return int(reading.execute(sa.select(sa.func.count()).select_from(purchase)).scalar_one())

    try:
        for _ in range(_KILLS):
            enough = purchases() + dice.randrange(1, 40)
            eventually(lambda enough=enough: purchases() >= enough, seconds=60)
            processes.kill(dice.randrange(5))
        processes.stop(range(2))
        eventually(lambda: store.standing().unsent == 0, seconds=120, describe=store.standing)
    finally:
        processes.stop(range(5))
    with database.connect() as reading:
        made = {f"{row.line}:{row.number}" for row in reading.execute(sa.select(purchase))}
    first: dict[str, list[int]] = defaultdict(list)
    seen: set[str] = set()
    copies = _received(rabbitmq)
    for properties in copies:
        key = properties.headers["tmc-key"]
        line, _, number = key.partition(":")
        if key not in seen and "tmc-order-key" in properties.headers:
            first[line].append(int(number))
        seen.add(key)
    assert seen == made
    assert len(first) == 6
    assert all(numbers == sorted(numbers) for numbers in first.values())
    standing = store.standing()
    note(f"outbox: {_KILLS} kills, {len(made)} messages, {len(copies)} copies, directly {standing.direct_share:.2f}")
    assert standing.failed == 0
