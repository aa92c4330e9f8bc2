"""`tmc admin` on a terminal and in a pipe: tables, JSON, what is stuck, completion."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_storm.eventually import eventually

TMC = str(Path(sys.executable).parent / "tmc")


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    """A delivery failed, and a message is undecided."""
    with RunningCenter(f"sqlite:///{tmp_path_factory.mktemp('tables')}/c.db") as made:
        with (
            tmc.connect(made.address, app="orders", key=made.keys["orders"]) as orders,
            tmc.connect(made.address, app="coupons", key=made.keys["coupons"]) as coupons,
        ):
            consumer = tmc.Consumer(coupons)

            @consumer.listener("order.paid")
            def refuse(_body: bytes) -> None:
                raise tmc.Reject("no stock \x1b[31m")

            with consumer:
                orders.publish("order.paid", b"x", key="bad")
                eventually(lambda: "bad" in made.run_admin("stuck").stdout)
            orders.prepare("order.paid", b"x", key="open", timeout=timedelta(seconds=30))
        yield made


def _on_a_terminal(center: RunningCenter, *arguments: str) -> str:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TMC_ADDRESS": center.address, "TMC_ADMIN_TOKEN": center.token}
    process = subprocess.Popen([TMC, "admin", *arguments], stdout=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65_536):
            shown += part
    except OSError:  # the other side was closed
        pass
    finally:
        os.close(ours)
    assert process.wait(60) == 0
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("command", "titles", "cell"),
    [
        (["list-topics"], {"NAME", "OWNER", "TRANSACTION TIME"}, "order.paid"),
        (["list-subscriptions"], {"TOPIC", "APP"}, "coupons"),
        (["list-apps"], {"ID", "SERVICE NAME"}, "orders"),
        (["list-servers"], {"NAME", "ALIVE"}, "yes"),
        (["get-configuration", "--changed"], {"version: ", "NAME", "VALUE"}, "store.catalog"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_listing_is_a_table_on_a_terminal(
    center: RunningCenter, command: list[str], titles: set[str], cell: str
) -> None:
    shown = _on_a_terminal(center, *command)
    assert all(title in shown for title in titles), shown
    assert cell in shown
    assert json.loads(_on_a_terminal(center, *command, "--json"))
    assert json.loads(center.run_admin(*command).stdout)


def test_an_empty_listing_says_so(center: RunningCenter) -> None:
    assert _on_a_terminal(center, "list-bulk") == "Nothing.\n"


@pytest.mark.parametrize("command", ["list-messages", "list-consumptions", "list-operators", "overview", "stuck"])
def test_json_is_json_on_a_terminal_too(center: RunningCenter, command: str) -> None:
    assert json.loads(_on_a_terminal(center, command, "--json"))
    with pytest.raises(json.JSONDecodeError):
        json.loads(_on_a_terminal(center, command))


def test_one_command_shows_what_is_stuck(center: RunningCenter) -> None:
    shown = center.run_admin("stuck", "--older-than", "1ms").stdout
    (failed,) = [line for line in shown.splitlines() if "FAILED" in line]
    (undecided,) = [line for line in shown.splitlines() if "UNDECIDED" in line]
    assert "bad" in failed
    assert "no stock \\u001b[31m" in failed
    assert "open" in undecided
    assert "UNDECIDED" not in center.run_admin("stuck").stdout  # for less than ten minutes
    assert center.run_admin("stuck", "no.such").stderr
    found = json.loads(center.run_admin("stuck", "--older-than", "1ms", "--json").stdout)
    assert [each["key"] for each in found["undecided"]["messages"]] == ["open"]


def test_a_bulk_job_is_watched_as_a_bar_until_it_ends(center: RunningCenter) -> None:
    matched = json.loads(center.run_admin("bulk", "reactivate", "--topic", "order.paid").stdout)
    start = [
        "--dry-run",
        matched["dry_run"],
        "--count",
        matched["count"],
        "--hold-ms",
        "0",
        "--reason",
        "stock is back",
    ]
    job = json.loads(center.run_admin("bulk", "reactivate", "--topic", "order.paid", *start).stdout)["job"]
    shown = _on_a_terminal(center, "get-bulk", job, "--watch", "0.2")
    assert f"Job {job}, finished: FAILED deliveries of order.paid" in shown
    assert f"[{'#' * 30}] 1/1 1 done, 0 unchanged, 0 refused" in shown


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["tmc", "compl"], "completion"),
        (["tmc", "admin", "register-op"], "register-operator"),
        (["tmc", "admin", "--address", "x", "why", "--js"], "--json"),
        (["tmc", "admin", "decide", "--rea"], "--reason"),
        (["tmc", "serve", "--con"], "--config"),
    ],
    ids=" ".join,
)
def test_a_shell_completes(words: list[str], completed: str) -> None:
    script = subprocess.run([TMC, "completion", "bash"], capture_output=True, text=True, check=True).stdout
    quoted = " ".join(f"'{word}'" for word in words)
    asked = f'{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _tmc; echo "${{COMPREPLY[@]}}"'
    assert subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True).stdout.split() == [
        completed
    ]


def test_another_shell_is_refused() -> None:
    refused = subprocess.run([TMC, "completion", "fish"], capture_output=True, text=True, check=False)
    assert (refused.returncode, "tmc completion bash|zsh" in refused.stderr) == (2, True)
