"""./scripts/dev-services: private MariaDB, RabbitMQ and Consul for development, in .dev-services/.

start: start what does not run, and make the tables.  stop: stop all by their process ids.  status: what runs.
env: variables for `tmc serve`, to be read by `eval "$(./scripts/dev-services env)"`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.cluster import TMC
from tmc_storm.eventually import eventually
from tmc_storm.services.consul import Consul
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.rabbitmq import RabbitMQ

HOME = Path(os.environ.get("TMC_DEV_SERVICES", Path(__file__).parents[2] / ".dev-services"))
STATE = HOME / "state.json"


def _state() -> dict[str, Any]:
    return json.loads(STATE.read_text()) if STATE.exists() else {}


def _started(pid: int) -> str | None:
    """When that process was started, as the kernel tells; a number that was given to another process differs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _runs(service: Mapping[str, Any]) -> bool:
    return all(_started(pid) == when for pid, when in service["pids"])


def _note(pids: list[int], **values: str) -> dict[str, Any]:
    return {"pids": [(pid, _started(pid)) for pid in pids], **values}


def _start_mariadb() -> dict[str, Any]:
    server = MariaDB(home=_folder("mariadb"))
    assert server.process is not None
    return _note([server.process.pid], url=server.url("tmc"))


def _start_rabbitmq() -> dict[str, Any]:
    broker = RabbitMQ(home=_folder("rabbitmq"))
    assert broker.process is not None
    assert broker._epmd is not None
    return _note([broker.process.pid, broker._epmd.pid], url=broker.url)


def _start_consul() -> dict[str, Any]:
    agent = Consul(keep=True)
    assert agent.process is not None
    return _note([agent.process.pid], url=agent.address)


SERVICES = {"mariadb": _start_mariadb, "rabbitmq": _start_rabbitmq, "consul": _start_consul}


def _folder(name: str) -> Path:
    folder = HOME / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def start() -> int:
    HOME.mkdir(exist_ok=True)
    state = _state()
    for name, begin in SERVICES.items():
        if name not in state or not _runs(state[name]):
            _stop_one(state.pop(name, None))
            state[name] = begin()
            STATE.write_text(json.dumps(state, indent=2))
    made = subprocess.run(
        [TMC, "init"], env=os.environ | _environment(state), capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        print(made.stderr, file=sys.stderr)
        return 1
    token = made.stdout.strip()
    if "shown once" in made.stderr:
        (HOME / "admin-token").write_text(token)
    return status()


def _stop_one(service: Mapping[str, Any] | None) -> None:
    for pid, when in service["pids"] if service else ():
        if _started(pid) == when:
            os.kill(pid, signal.SIGTERM)
            eventually(lambda pid=pid, when=when: _ended(pid, when))


def _ended(pid: int, when: str) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # ours, when start failed half way
    return _started(pid) != when


def stop() -> int:
    state = _state()
    for name in reversed(list(state)):
        _stop_one(state.pop(name))
        STATE.write_text(json.dumps(state, indent=2))
    print("stopped")
    return 0


def status() -> int:
    state = _state()
    for name in SERVICES:
        runs = name in state and _runs(state[name])
        print(f"{name:9} {'runs     ' + state[name]['url'] if runs else 'stopped'}")
    return 0 if all(name in state and _runs(state[name]) for name in SERVICES) else 3


def _environment(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        "TMC_STORE__CATALOG": state["mariadb"]["url"],
        "TMC_DELIVERY__KIND": "rabbitmq",
        "TMC_RABBITMQ__URL": state["rabbitmq"]["url"],
        "TMC_RABBITMQ__SINGLE_NODE": "true",
        "TMC_CONSUL__AGENT": state["consul"]["url"],
        "TMC_DISCOVERY__KIND": "consul",
    }


def env() -> int:
    state = _state()
    if not all(name in state and _runs(state[name]) for name in SERVICES):
        print("the services do not run: ./scripts/dev-services start", file=sys.stderr)
        return 3
    values = _environment(state)
    token = HOME / "admin-token"
    if token.exists():
        values["TMC_ADMIN_TOKEN"] = token.read_text()
    for name, value in values.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def main() -> int:
    commands = {"start": start, "stop": stop, "status": status, "env": env}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        print(__doc__, file=sys.stderr)
        return 2
    return commands[sys.argv[1]]()


if __name__ == "__main__":
    raise SystemExit(main())
