"""Random faults, one after the other or two at once: what a bad night does to servers, databases, the broker and the net.

The same seed gives the same sequence of faults; when they strike depends on the machine.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.cluster import Cluster
from tests.support.story.cast import Story


@dataclass(frozen=True, kw_only=True)
class Fault:
    """begin, end: what breaks and what mends it.  part: no two faults of one part at the same time."""

    name: str
    part: str
    begin: Callable[[], object]
    end: Callable[[], object]


def _stopped(pid: Callable[[], int], number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(pid(), number)


def faults_of(cluster: Cluster, story: Story) -> list[Fault]:
    """Everything that can break in this cluster."""
    proxy = cluster.proxy
    assert proxy is not None
    found = [
        Fault(name="net: cut", part="net", begin=proxy.cut, end=proxy.pass_through),
        Fault(name="net: reset", part="net", begin=proxy.reset, end=proxy.pass_through),
        Fault(name="net: black hole", part="net", begin=proxy.black_hole, end=proxy.pass_through),
        Fault(name="net: delay 0.2 s", part="net", begin=lambda: proxy.delay(0.2), end=proxy.pass_through),
        Fault(name="broker: kill", part="net", begin=cluster.broker.kill, end=cluster.broker.start),
    ]
    for i, server in enumerate(cluster.servers):
        part = f"server {i}"
        found += [
            Fault(name=f"{part}: kill", part=part, begin=server.kill, end=server.start),
            Fault(
                name=f"{part}: stop and continue",
                part=part,
                begin=_stopped(lambda server=server: server.pid, signal.SIGSTOP),
                end=_stopped(lambda server=server: server.pid, signal.SIGCONT),
            ),
        ]
    for i, database in enumerate(cluster.databases):
        part = f"database {i}"
        found += [
            Fault(name=f"{part}: kill", part=part, begin=database.kill, end=database.start),
            Fault(
                name=f"{part}: stop and continue",
                part=part,
                begin=_stopped(lambda database=database: database.process.pid, signal.SIGSTOP),
                end=_stopped(lambda database=database: database.process.pid, signal.SIGCONT),
            ),
        ]
    for app in story.apps:
        found.append(
            Fault(
                name=f"consumer {app}: kill",
                part=f"consumer {app}",
                begin=lambda app=app: story.kill_consumer(app),
                end=lambda app=app: story.start_consumer(app),
            )
        )
    return found


class Storm:
    """seed: of the sequence.  struck: how often each fault struck."""

    def __init__(self, cluster: Cluster, story: Story, seed: int) -> None:
        self._faults = faults_of(cluster, story)
        self._random = random.Random(seed)
        self.struck: Counter[str] = Counter()

    def rage(self, seconds: float) -> None:
        """Faults until the time is over; everything works again when it returns."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._strike()

    def _strike(self) -> None:
        first = self._random.choice(self._faults)
        others = [fault for fault in self._faults if fault.part != first.part]
        both = [first, *self._random.sample(others, self._random.choice((0, 0, 1)))]
        for fault in both:
            self.struck[fault.name] += 1
            fault.begin()
        self._wait(self._random.uniform(0.2, 6.0))
        for fault in sorted(
            both, key=lambda fault: fault.part.startswith("server")
        ):  # a server starts on what is there
            fault.end()
        self._wait(self._random.uniform(0.0, 3.0))

    @staticmethod
    def _wait(seconds: float) -> None:
        time.sleep(seconds)  # the length of a fault is the experiment
