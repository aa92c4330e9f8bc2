"""A private Kafka of one node on free ports, from the jars of `scripts/install-jars kafka`; stopped by its process id."""

from __future__ import annotations

import atexit
import shutil
import signal
import subprocess
import tempfile
import uuid
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tmc_storm.eventually import eventually
from tmc_storm.services.cache import cache
from tmc_storm.services.ports import free_port

JARS = cache() / "kafka"
_JAVA = ("java", "-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class Kafka:
    """bootstrap: what clients and the center take."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="tmc-kafka-"))
        atexit.register(self.stop)
        self.port, controller = free_port(), free_port()
        self.bootstrap = f"127.0.0.1:{self.port}"
        self._properties = self.home / "server.properties"
        self._properties.write_text(
            "process.roles=broker,controller\nnode.id=1\n"
            f"controller.quorum.voters=1@127.0.0.1:{controller}\n"
            f"listeners=PLAINTEXT://{self.bootstrap},CONTROLLER://127.0.0.1:{controller}\n"
            f"advertised.listeners=PLAINTEXT://{self.bootstrap}\n"
            "controller.listener.names=CONTROLLER\ninter.broker.listener.name=PLAINTEXT\n"
            "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT\n"
            f"log.dirs={self.home}/data\nnum.partitions=3\noffsets.topic.num.partitions=3\n"
            "offsets.topic.replication.factor=1\ntransaction.state.log.replication.factor=1\n"
            "transaction.state.log.min.isr=1\ngroup.initial.rebalance.delay.ms=0\nauto.create.topics.enable=false\n"
        )
        (self.home / "log4j2.properties").write_text(
            "status = error\nappender.c.type = Console\nappender.c.name = c\nappender.c.layout.type = PatternLayout\n"
            "appender.c.layout.pattern = %d %p %c{1} %m%n\nrootLogger.level = warn\nrootLogger.appenderRef.c.ref = c\n"
        )
        self.process: subprocess.Popen[bytes] | None = None
        cluster = uuid.uuid4().hex[:22]
        done = self._run("kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(self._properties))
        assert done.wait(120) == 0, self.output
        self.start()

    @property
    def output(self) -> str:
        return (self.home / "output").read_text()[-3000:]

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        logging = f"-Dlog4j2.configurationFile={self.home}/log4j2.properties"
        with open(self.home / "output", "ab") as log:
            return subprocess.Popen(
                [*_JAVA, logging, "-cp", f"{JARS}/*", *command], stdout=log, stderr=log, cwd=self.home
            )

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.process = self._run("kafka.Kafka", str(self._properties))
        eventually(self._answers)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.output
        try:
            return bool(self.admin().list_topics(timeout=2).brokers)
        except KafkaException:
            return False

    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.home, ignore_errors=True)
