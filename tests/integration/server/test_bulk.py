"""Bulk jobs and replays, as an operator asks for them: `tmc admin bulk`, `replay`."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_storm.eventually import eventually


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder: Path = tmp_path_factory.mktemp("bulk")
    with RunningCenter(f"sqlite:///{folder}/tmc.db") as made:
        yield made


@pytest.fixture(scope="module")
def two_subscribers(center: RunningCenter) -> None:
    """Topic bulk.acked goes to coupons and invoices."""
    for app in ("coupons", "invoices"):
        center.subscribe("bulk.acked", app)


def answer(center: RunningCenter, *arguments: str) -> dict[str, Any]:
    done = center.run_admin(*arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Consumer:
    """Of one topic, until the block ends. fails: how it answers now.  handled: bodies of what it took, by times."""

    def __init__(self, center: RunningCenter, topic: str, app: str, fails: bool = False) -> None:
        self.handled: Counter[str] = Counter()
        self.fails = threading.Event()
        if fails:
            self.fails.set()
        self._center = tmc.connect(center.address, app=app, key=center.keys[app])
        self._consumer = tmc.Consumer(self._center)

        @self._consumer.listener(topic)
        def handle(body: bytes) -> None:
            if self.fails.is_set():
                raise tmc.Reject(f"Timeout of order '{body.decode()}' after 3 s")
            self.handled[body.decode()] += 1

    def __enter__(self) -> Consumer:
        self._consumer.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._consumer.__exit__(None, None, None)
        self._center.close()


def publish(center: RunningCenter, topic: str, *bodies: str) -> list[str]:
    with tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders:
        return [orders.publish(topic, body.encode(), key=f"{topic}-{body}") for body in bodies]


def states(center: RunningCenter, topic: str, app: str) -> Counter[str]:
    found = answer(center, "list-consumptions", topic, "--app", app, "--json").get("consumptions", [])
    return Counter(each["state"].removeprefix("CONSUMPTION_STATE_") for each in found)


def test_from_the_dry_run_to_the_outcomes(center: RunningCenter) -> None:
    center.subscribe("bulk.failed", "coupons")
    with Consumer(center, "bulk.failed", "coupons", fails=True) as consumer:
        ids = publish(center, "bulk.failed", *map(str, range(20)))
        eventually(lambda: states(center, "bulk.failed", "coupons")["FAILED"] == 20)
        consumer.fails.clear()
        tried = center.run_admin("bulk", "reactivate", "--topic", "bulk.failed", "--app", "coupons", "--hold-ms", "1")
        seen = json.loads(tried.stdout)
        assert (int(seen["count"]), len(seen["samples"])) == (20, 10)
        (fingerprint,) = {each["fingerprint"] for each in seen["samples"]}
        assert re.fullmatch("[0-9a-f]{12}", fingerprint)
        assert "Timeout of order" in seen["samples"][0]["error"]
        assert "Nothing was changed" in tried.stderr
        command = next(line for line in tried.stderr.splitlines() if line.startswith("tmc admin bulk"))
        arguments = shlex.split(command.replace("'...'", "mended"))[2:]
        job = answer(center, *arguments)
        assert answer(center, *arguments)["job"] == job["job"]
        done = eventually(lambda: _ended(center, job["job"]))
        assert (done["state"], int(done["done"]), done["reason"]) == ("BULK_STATE_FINISHED", 20, "mended")
        eventually(lambda: len(consumer.handled) == 20)
    items = answer(center, "list-bulk-items", job["job"])["items"]
    assert sorted(each["message_id"] for each in items) == sorted(ids)
    assert {each["outcome"] for each in items} == {"BULK_OUTCOME_DONE"}
    assert answer(center, "list-bulk-items", job["job"], "--failures-only") == {}
    assert [each["job"] for each in answer(center, "list-bulk")["jobs"]] == [job["job"]]
    nothing = center.run_admin("bulk", "reactivate", "--topic", "bulk.failed")
    assert "Nothing matches." in nothing.stderr


def _ended(center: RunningCenter, job: str) -> dict[str, Any] | None:
    found = answer(center, "get-bulk", job)
    return found if "finished_ms" in found else None


def test_stopped_in_its_hold(center: RunningCenter) -> None:
    center.subscribe("bulk.held", "coupons")
    publish(center, "bulk.held", "a")
    seen = answer(center, "bulk", "cancel", "--topic", "bulk.held", "--state", "scheduled")
    start = ("--topic", "bulk.held", "--state", "scheduled", "--dry-run", seen["dry_run"], "--count", seen["count"])
    job = answer(center, "bulk", "cancel", *start, "--reason", "test", "--hold-ms", "3600000")
    assert job["state"] == "BULK_STATE_HELD"
    assert answer(center, "stop-bulk", job["job"], "--reason", "a mistake")["state"] == "BULK_STATE_STOPPED"
    assert states(center, "bulk.held", "coupons") == {"SCHEDULED": 1}


@pytest.mark.usefixtures("two_subscribers")
def test_a_replay_reaches_one_subscriber_and_its_handler_runs_again(center: RunningCenter) -> None:
    with Consumer(center, "bulk.acked", "coupons") as coupons, Consumer(center, "bulk.acked", "invoices") as invoices:
        (one,) = publish(center, "bulk.acked", "a")
        eventually(lambda: coupons.handled["a"] == invoices.handled["a"] == 1)
        eventually(lambda: states(center, "bulk.acked", "coupons")["ACKED"] == 1)
        made = answer(center, "replay", one, "coupons", "--reason", "its table was restored")
        assert made["headers"]["tmc-replay-of"] == one
        assert f"a replay of {one}." in center.run_admin("timeline", made["message_id"]).stdout
        assert answer(center, "replay", one, "coupons", "--reason", "again")["message_id"] == made["message_id"]
        eventually(lambda: coupons.handled["a"] == 2)
        eventually(lambda: states(center, "bulk.acked", "coupons")["ACKED"] == 2)
        seen = answer(center, "bulk", "replay", "--topic", "bulk.acked", "--app", "coupons")
        start = ("--topic", "bulk.acked", "--app", "coupons", "--dry-run", seen["dry_run"], "--count", seen["count"])
        job = answer(center, "bulk", "replay", *start, "--reason", "test", "--hold-ms", "0")
        done = eventually(lambda: _ended(center, job["job"]))
        assert done["selection"].startswith("ACKED deliveries of bulk.acked to coupons (default), since 20")
        assert (int(done["done"]), int(done["unchanged"])) == (1, 1)  # the replay itself is left out
        eventually(lambda: coupons.handled["a"] == 3)
        assert invoices.handled["a"] == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bulk", "reactivate"], "name a topic or an app"),
        (["bulk", "reactivate", "--topic", "nothing"], "There is no topic 'nothing'"),
        (["bulk", "reactivate", "--app", "nobody"], "There is no app 'nobody'"),
        (["bulk", "explode", "--topic", "order.paid"], "'explode' is none of"),
        (["bulk", "reactivate", "--topic", "order.paid", "--state", "acked"], "state must be FAILED"),
        (
            ["bulk", "cancel", "--topic", "order.paid", "--state", "waiting", "--fingerprint", "0" * 12],
            "fingerprint must",
        ),
        (["bulk", "reactivate", "--topic", "order.paid", "--fingerprint", "x"], "fingerprint must be 12 hex digits"),
        (["bulk", "reactivate", "--topic", "order.paid", "--dry-run", "x"], "dry_run must be the id"),
        (
            ["bulk", "reactivate", "--topic", "order.paid", "--dry-run", "17-ab", "--count", "3"],
            "dry_run must be the id",
        ),
        (["bulk", "replay", "--topic", "bulk.acked"], "a replay goes to one subscriber"),
        (["get-bulk", "4711"], "There is no such bulk job"),
        (["stop-bulk", "4711", "--reason", "x"], "There is no such bulk job"),
        (["list-bulk-items", "4711"], "There is no such bulk job"),
        (["replay", "1-1-05-1", "coupons", "--reason", "x"], "There is no such delivery"),
    ],
)
@pytest.mark.usefixtures("two_subscribers")
def test_wrong_commands(center: RunningCenter, arguments: list[str], sentence: str) -> None:
    done = center.run_admin(*arguments)
    assert done.returncode in (1, 2)
    assert sentence in done.stderr


def test_a_job_needs_the_count_and_the_filter_of_its_dry_run(center: RunningCenter) -> None:
    center.subscribe("bulk.seen", "coupons")
    publish(center, "bulk.seen", "a", "b")
    wanted = ("--topic", "bulk.seen", "--state", "scheduled")
    seen = answer(center, "bulk", "cancel", *wanted)
    for other in (
        (*wanted, "--count", "3"),
        ("--topic", "order.paid", "--state", "scheduled", "--count", "2"),
        (*wanted, "--app", "coupons", "--count", "2"),
    ):
        refused = center.run_admin("bulk", "cancel", *other, "--dry-run", seen["dry_run"], "--reason", "test")
        assert refused.returncode == 1
        assert "dry_run must be the id" in refused.stderr


def test_a_job_over_topics_subscribed_in_reverse(center: RunningCenter) -> None:
    topics = [f"bulk.reverse.{number}" for number in range(3)]
    settings = {"topic_settings": {"table_index": 9}}
    for topic in topics:
        center.subscribe(topic, "invoices", **settings)
    for topic in reversed(topics):
        center.subscribe(topic, "reversed", **settings)
        publish(center, topic, "a", "b")
    wanted = ("--app", "reversed", "--state", "scheduled")
    seen = answer(center, "bulk", "cancel", *wanted)
    assert seen["count"] == "6"
    start = (*wanted, "--dry-run", seen["dry_run"], "--count", "6", "--reason", "test", "--hold-ms", "0")
    job = answer(center, "bulk", "cancel", *start)
    assert eventually(lambda: _ended(center, job["job"]))["done"] == "6"


def test_a_time_that_is_far_away_is_shown(center: RunningCenter) -> None:
    """Microseconds for milliseconds."""
    far = ("bulk", "cancel", "--topic", "bulk.failed", "--to-ms", "1763856000000000", "--state", "FAILED")
    center.subscribe("bulk.far", "coupons")
    with Consumer(center, "bulk.far", "coupons", fails=True):
        publish(center, "bulk.far", "1")
        eventually(lambda: states(center, "bulk.far", "coupons") == {"FAILED": 1})
    words = [*far[:3], "bulk.far", *far[4:]]
    seen = answer(center, *words)
    start = ["--dry-run", seen["dry_run"], "--count", seen["count"], "--reason", "test", "--hold-ms", "60000"]
    job = answer(center, *words, *start)
    assert "made before 9999-12-31 23:59:59 UTC" in job["selection"]
    assert answer(center, "list-bulk")["jobs"]
    answer(center, "stop-bulk", job["job"], "--reason", "test")


def test_producers_cannot_take_keys_of_replays(center: RunningCenter) -> None:
    with (
        tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders,
        pytest.raises(tmc.InvalidRequest, match="key must not begin with replay"),
    ):
        orders.publish("order.paid", b"", key="replay.1-1-05-1.1.0.0")
