"""Alerts from the failure to the mail, and what an operator does about them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.center import RunningCenter
from tmc_cli.admin.alerts import still_failed
from tmc_common.protocol import admin_pb2
from tmc_server.store import episodes
from tmc_storm.eventually import eventually


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder: Path = tmp_path_factory.mktemp("alerts")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(episodes, "SETTLED_MS", 1_000)
        with RunningCenter(f"sqlite:///{folder}/tmc.db") as made:
            yield made


@pytest.fixture(scope="module")
def alert_id(center: RunningCenter) -> str:
    """Of a delivery that was rejected."""
    center.rejected("paid-1")
    (alert,) = json.loads(center.run_admin("list-alerts", "--json").stdout)["alerts"]
    assert (alert["kind"], alert["topic"], alert["app"]) == ("delivery failed", "order.paid", "coupons")
    return str(alert["alert_id"])


def test_a_list_for_people(center: RunningCenter, alert_id: str) -> None:
    name, detail, count, message, still = center.run_admin("list-alerts").stdout.splitlines()
    assert name == f"{alert_id}  delivery failed: order.paid for coupons (default)"
    assert "no stock for paid-1" in detail
    assert count.strip().startswith("1 since ")
    assert "fingerprint" in count
    assert message.strip().startswith("1-1-")
    listed = center.run_admin(*shlex.split(still.partition("still failed: tmc admin ")[2])).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["MESSAGE", message.strip()]
    assert listed[1].split()[-5:] == [alert_fingerprint(center), "no", "stock", "for", "paid-1"]


def alert_fingerprint(center: RunningCenter) -> str:
    (alert,) = json.loads(center.run_admin("list-alerts", "--json").stdout)["alerts"]
    return str(alert["fingerprint"])


@pytest.mark.parametrize(
    ("alert", "command"),
    [
        ({"fingerprint": "5d0c2f7be1a9"}, "list-consumptions t --app a --tag default --fingerprint 5d0c2f7be1a9"),
        ({"fingerprint": "other"}, "list-consumptions t --app a --tag default --state failed"),
        ({"kind": "check failed", "app": "", "fingerprint": "5d0c2f7be1a9"}, "list-messages t --state check_failed"),
        ({"kind": "no consumer"}, ""),
        ({"topic": ""}, ""),
    ],
)
def test_the_command_of_what_is_still_failed(alert: dict[str, str], command: str) -> None:
    fields = {"kind": "delivery failed", "topic": "t", "app": "a", "tag": "default"} | alert
    assert still_failed(admin_pb2.Alert(**fields)) == (f"tmc admin {command}" if command else "")


def test_the_fingerprint_leads_to_the_failures(center: RunningCenter, alert_id: str) -> None:
    (alert,) = json.loads(center.run_admin("list-alerts", "--json").stdout)["alerts"]
    found = center.run_admin("bulk", "reactivate", "--topic", "order.paid", "--fingerprint", alert["fingerprint"])
    assert alert["alert_id"] == alert_id
    assert json.loads(found.stdout)["count"] == "1"


def test_acknowledging(center: RunningCenter, alert_id: str) -> None:
    done = json.loads(center.run_admin("acknowledge-alert", alert_id, "--reason", "looking").stdout)
    assert done["acknowledged_by"] == "admin"
    assert "[acknowledged by admin]" in center.run_admin("list-alerts").stdout


def test_silences(center: RunningCenter, alert_id: str) -> None:
    scope = ("--topic", "order.paid", "--app", "coupons", "--kind", "delivery failed")
    made = json.loads(center.run_admin("silence-alerts", "--for", "2h", *scope, "--reason", "night").stdout)
    assert (made["topic"], made["app"], made["tag"]) == ("order.paid", "coupons", "default")
    assert f"{alert_id}  delivery failed" in (shown := center.run_admin("list-alerts").stdout)
    assert "silenced until" in shown
    (listed,) = json.loads(center.run_admin("list-silences").stdout)["silences"]
    assert listed == made
    center.run_admin("end-silence", made["silence"], "--reason", "day")
    assert json.loads(center.run_admin("list-silences").stdout) == {}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["acknowledge-alert", "17"], "such as 0-17"),
        (["acknowledge-alert", "0-999999"], "There is no such alert"),
        (["silence-alerts", "--for", "soon"], "90s, 10m, 2h or 1d"),
        (["silence-alerts", "--for", "31d"], "for_ms"),
        (["silence-alerts", "--for", "1h", "--topic", "nothing"], "There is no topic 'nothing'"),
        (["silence-alerts", "--for", "1h", "--app", "coupons"], "a topic, or one subscription"),
        (
            ["silence-alerts", "--for", "1h", "--topic", "order.paid", "--app", "orders"],
            "There is no such subscription",
        ),
        (["silence-alerts", "--for", "1h", "--kind", "everything"], "delivery failed"),
        (["end-silence", "999"], "There is no silence 999"),
    ],
)
def test_mistakes_get_one_sentence(center: RunningCenter, arguments: list[str], sentence: str) -> None:
    done = center.run_admin(*arguments, "--reason", "test")
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_when_nothing_is_left_it_is_resolved(center: RunningCenter, alert_id: str) -> None:
    (alert,) = json.loads(center.run_admin("list-alerts", "--json").stdout)["alerts"]
    center.run_admin("cancel", alert["message_ids"][0], "coupons", "--reason", "sold out")
    eventually(lambda: "None." in center.run_admin("list-alerts").stderr, seconds=60)
    shown = center.run_admin("list-alerts", "--resolved").stdout
    assert shown.startswith(f"{alert_id}  delivery failed: order.paid for coupons (default) [resolved 20")
