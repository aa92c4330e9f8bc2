"""`tmc admin subscribe` and `set-check` change what is named, and say what it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import TMC
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port


class Operator:
    """Runs `tmc admin` against one server."""

    def __init__(self, address: str) -> None:
        self._address = address

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [TMC, "admin", "--address", self._address, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def change(self, *arguments: str) -> tuple[Any, list[str]]:
        """Returns: the answer, and the lines old -> new."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr.splitlines()


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    folder: Path = tmp_path_factory.mktemp("partial")
    port = free_port()
    with (folder / "log").open("wb") as log:
        command = [TMC, "dev", "--port", str(port), "--data", str(folder / "dev.db")]
        process = subprocess.Popen(command, stderr=log, env=os.environ | {"TMC_LOG__LEVEL": "info"})
    try:
        eventually(lambda: "serving on port" in (folder / "log").read_text(), seconds=60)
        found = Operator(f"127.0.0.1:{port}")
        for arguments in ("register-app orders", "register-app coupons", "register-topic order.paid --owner orders"):
            found.change(*arguments.split())
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_a_subscription_keeps_what_is_not_named(operator: Operator) -> None:
    made, lines = operator.change(
        "subscribe", "order.paid", "coupons", "--exponential", "--interval-ms", "500", "--cap-ms", "9000"
    )
    assert (made["retry"]["kind"], lines) == ("RETRY_KIND_EXPONENTIAL", [])
    changed, lines = operator.change("subscribe", "order.paid", "coupons", "--max-retry", "3")
    assert changed["retry"] == made["retry"] | {"max_retry": 3}
    assert lines == ["retry.max_retry: 16 -> 3"]
    changed, lines = operator.change("subscribe", "order.paid", "coupons", "--linear", "--interval-ms", "700")
    assert lines == ["retry.kind: RETRY_KIND_EXPONENTIAL -> RETRY_KIND_LINEAR", "retry.interval_ms: 500 -> 700"]
    assert (changed["retry"]["cap_ms"], changed["retry"]["max_retry"]) == ("9000", 3)
    assert operator.change("subscribe", "order.paid", "coupons")[1] == ["Nothing changed."]


def test_a_check_keeps_what_is_not_named(operator: Operator) -> None:
    first = ["--kind", "http", "--address", "127.0.0.1:1", "--option", "path=/verify", "--option", "batch=true"]
    operator.change("set-check", "order.paid", *first, "--deadline-ms", "900", "--untried", "--exponential")
    operator.change(
        "set-check", "order.paid", "--name", "old", "--kind", "grpc", "--address", "127.0.0.1:2", "--untried"
    )
    before = operator.change("get-check", "order.paid")[0]
    assert [target.get("name", "") for target in before["targets"]] == ["", "old"]

    after, lines = operator.change("set-check", "order.paid", "--max-retry", "4", "--untried")
    assert (after["targets"], lines) == (before["targets"], ["retry.max_retry: 15 -> 4"])
    assert after["retry"]["kind"] == "RETRY_KIND_EXPONENTIAL"

    after, lines = operator.change("set-check", "order.paid", "--option", "path=/v2", "--option", "batch=", "--untried")
    assert after["targets"][0]["options"] == {"path": "/v2"}
    assert (after["targets"][0]["address"], after["targets"][0]["deadline_ms"]) == ("127.0.0.1:1", 900)
    assert sorted(lines) == [
        "targets.(unnamed).options.batch: true -> unset",
        "targets.(unnamed).options.path: /verify -> /v2",
    ]
    after, _ = operator.change("set-check", "order.paid", "--name", "old", "--concurrency", "2", "--untried")
    assert after["targets"][1]["address"] == "127.0.0.1:2"

    after, _ = operator.change("set-check", "order.paid", "--remove", "old", "--untried")
    assert [target["kind"] for target in after["targets"]] == ["http"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--name", "new", "--address", "127.0.0.1:1"], "The topic has no target 'new' yet: give --kind"),
        (["--remove", "none"], "The topic has no target 'none'"),
        (["--option", "path"], "'path' is not NAME=VALUE"),
    ],
)
def test_a_mistake_about_a_check_changes_nothing(operator: Operator, arguments: list[str], says: str) -> None:
    before = operator.change("get-check", "order.paid")[0]
    done = operator.run("set-check", "order.paid", *arguments)
    assert (done.returncode, says in done.stderr) == (2, True)
    assert operator.change("get-check", "order.paid")[0] == before
