"""A private RabbitMQ on free ports: own node name, own epmd, own data, stopped by its process id."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pika

from tmc_common.amqp import connect
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import accepts, free_port
from tmc_storm.services.service import Service

LIBRARY = Path("/usr/lib/rabbitmq/bin")


def _script(name: str) -> str:
    """The package's own script: the one on the PATH would change to another user first."""
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob(f"*/sbin/{name}"))
    return str(found[-1] if found else LIBRARY / name)


class RabbitMQ(Service):
    """One private broker; guest:guest. `url` is what the center and pika take. home: keep the data there.

    epmd_port, cookie: of a node that runs already, so that the nodes of a cluster find each other; 0, "": its own.
    """

    def __init__(
        self, home: Path | None = None, plugins: Sequence[str] = (), epmd_port: int = 0, cookie: str = ""
    ) -> None:
        self._keep = home is not None
        self.home = home or Path(tempfile.mkdtemp(prefix="tmc-rabbitmq-"))
        self.home.mkdir(parents=True, exist_ok=True)
        if not self._keep:
            atexit.register(self.stop)  # a test that fails half way leaves nothing behind
        self.port = free_port()
        self.node = f"tmc{self.port}@localhost" if home is None else "tmcdev@localhost"
        self._management_port = free_port()
        (self.home / "config").mkdir(exist_ok=True)
        (self.home / "config" / "rabbitmq.conf").write_text(
            f"management.tcp.ip = 127.0.0.1\nmanagement.tcp.port = {self._management_port}\n"
            * bool(plugins)
            + f"listeners.tcp.1 = 127.0.0.1:{self.port}\nloopback_users.guest = false\nlog.console = false\n"
            "vm_memory_high_watermark.absolute = 1GB\ndisk_free_limit.absolute = 50MB\n"
        )
        self.management = f"http://guest:guest@127.0.0.1:{self._management_port}"
        (self.home / "config" / "enabled_plugins").write_text(f"[{','.join(plugins)}].\n")
        self._environment = os.environ | {
            "HOME": str(self.home),
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_CONFIG_FILE": str(self.home / "config" / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.home / "config" / "enabled_plugins"),
            "RABBITMQ_FEATURE_FLAGS_FILE": str(self.home / "feature_flags"),
            "RABBITMQ_MNESIA_BASE": str(self.home / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.home / "log"),
            "RABBITMQ_PID_FILE": str(self.home / "pid"),
            "RABBITMQ_CONF_ENV_FILE": str(self.home / "no-env.conf"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none "
            "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(epmd_port or free_port()),
        }
        self._epmd: subprocess.Popen[bytes] | None = None
        if not epmd_port:
            self._epmd = self._start_epmd()
        kept = self.home / ".erlang.cookie"
        if not kept.exists():  # who knows it runs programs as this user
            kept.touch(mode=0o600)
            kept.write_text(cookie or secrets.token_hex(16))
            kept.chmod(0o400)
        self.cookie = kept.read_text()
        self.start()

    @property
    def epmd_port(self) -> int:
        return int(self._environment["ERL_EPMD_PORT"])

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2F"

    def _start_epmd(self) -> subprocess.Popen[bytes]:
        """Erlang's port mapper, ours: one that the node started by itself would outlive it."""
        port = self._environment["ERL_EPMD_PORT"]
        with open(self.home / "epmd", "ab") as log:
            command = ["epmd", "-port", port, "-address", "127.0.0.1"]
            epmd = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        eventually(lambda: accepts(int(port)))
        return epmd

    def start(self) -> None:
        """Start the node, and wait until it takes connections and, a moment later, commands."""
        self._run([_script("rabbitmq-server")], seconds=120, env=self._environment)
        self.control("await_startup")

    def _answers(self) -> bool:
        if not accepts(self.port):
            return False
        try:
            self.connect().close()
        except pika.exceptions.AMQPError:
            return False
        return True

    def connect(self) -> pika.BlockingConnection:
        return connect(pika.URLParameters(self.url))

    def control(self, *arguments: str) -> str:
        """Run rabbitmqctl, and return what it printed."""
        command = [_script("rabbitmqctl"), "-n", self.node, *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{arguments}: {done.returncode}: {done.stderr}{done.stdout}"
        return done.stdout

    def suspend(self) -> None:
        """It takes no more and answers nothing. Returns when every thread has stopped: a signal takes its time."""
        super().suspend()
        assert self.process is not None
        group = self.process.pid
        eventually(lambda: all(state == "T" for state in _states_of(group)))

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill -9 of the node and of everything it started."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait()
        if not self._keep:
            shutil.rmtree(self.home, ignore_errors=True)


class RabbitCluster:
    """Nodes of one broker on this machine: quorum queues have a member on each. `url` names all of them."""

    def __init__(self, count: int = 3) -> None:
        first = RabbitMQ()
        self.nodes = [first, *(RabbitMQ(epmd_port=first.epmd_port, cookie=first.cookie) for _ in range(count - 1))]
        for node in self.nodes[1:]:
            node.control("stop_app")
            node.control("join_cluster", first.node)
            node.control("start_app")
        self.control = first.control

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"amqp://guest:guest@{hosts}/%2F"

    def stop(self) -> None:
        for node in reversed(self.nodes):  # the first one has the port mapper
            node.stop()


def _states_of(group: int) -> Iterator[str]:
    """Yield the states of the threads of all processes of this group, as /proc shows them."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == group:
                for task in process.glob("task/*/stat"):
                    yield task.read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            continue  # it has ended
