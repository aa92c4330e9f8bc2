"""The programs of the story around a cluster: producers that insist on every order, consumer apps with an inbox each."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import sqlalchemy as sa

from tests.support.cluster import ROOT, TMC, Cluster
from tmc_client.producing.ledger import create_tables
from tmc_common.protocol import types_pb2

STORY = Path(__file__).parent


class Story:
    """Four producers and three consumer apps around a cluster."""

    def __init__(self, cluster: Cluster, folder: Path, count: int, producers: int = 4) -> None:
        self.cluster = cluster
        self.folder = folder
        urgent, plain = ("story.urgent", "story.bulk"), ("story.a", "story.b")
        self.apps = {"single": plain, "multi": urgent, "pair": urgent + plain}
        cluster.register("orders", *self.apps)
        made = []
        for app, topics in self.apps.items():
            for topic in topics:
                mode = types_pb2.QUEUE_MODE_SINGLE if topic in plain else types_pb2.QUEUE_MODE_MULTI
                retry = types_pb2.RetryPolicy(interval_ms=5000, max_retry=50)
                made.append(
                    cluster.subscribe(topic, app, retry=retry, topic_settings={"queue_mode": mode, "spread": 16})
                )
        cluster.in_effect(*made)
        for app in self.apps:
            self._make_tables(app)
        self.consumers = {app: self._consume(app) for app in self.apps}
        self.producers = [
            subprocess.Popen(
                [
                    sys.executable,
                    str(STORY / "producer.py"),
                    cluster.by_name,
                    cluster.keys["orders"],
                    f"p{number}",
                    str(count // producers),
                    "8",
                    str(folder),
                ],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
            for number in range(producers)
        ]

    def _consume(self, app: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "STORY_APP": app,
            "STORY_KEY": self.cluster.keys[app],
            "STORY_ADDRESS": self.cluster.by_name,
            "STORY_FOLDER": str(self.folder),
            "STORY_TOPICS": ",".join(self.apps[app]),
        }
        if app == "single":
            environment["STORY_SINGLE"] = "yes"
        processes = "2" if app == "pair" else "1"
        command = [TMC, "consume", "tests.support.story.consumers:consumer", "--processes", processes]
        with open(self.folder / f"{app}.log", "ab") as log:
            return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def kill_consumer(self, app: str) -> None:
        """Kill -9 of all its processes."""
        os.killpg(self.consumers[app].pid, signal.SIGKILL)
        self.consumers[app].wait()

    def start_consumer(self, app: str) -> None:
        self.consumers[app] = self._consume(app)

    def end_producers(self) -> None:
        """No further order; those that were begun are finished."""
        (self.folder / "enough").touch()

    def _make_tables(self, app: str) -> None:
        engine = sa.create_engine(f"sqlite:///{self.folder}/{app}.db")
        create_tables(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE effect (key VARCHAR(100))")
        engine.dispose()

    def effects(self, app: str) -> Counter[str]:
        connection = sqlite3.connect(self.folder / f"{app}.db", timeout=60)
        found = Counter(key for (key,) in connection.execute("SELECT key FROM effect"))
        connection.close()
        return found

    def progress(self, app: str = "pair") -> int:
        return sum(self.effects(app).values())

    def committed(self) -> set[str]:
        """Waits for the producers."""
        for producer in self.producers:
            assert producer.wait(300) == 0
        return {key for path in self.folder.glob("*.committed") for key in path.read_text().split()}

    def stop(self) -> None:
        self.end_producers()
        for process in [*self.producers, *self.consumers.values()]:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in [*self.producers, *self.consumers.values()]:
            process.wait(60)
