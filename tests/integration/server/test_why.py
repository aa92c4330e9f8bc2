"""`why` and `overview`, as an operator asks them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_cli.admin.text import age, duration_ms
from tmc_server.requests.explanations import Why


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder: Path = tmp_path_factory.mktemp("why")
    with RunningCenter(f"sqlite:///{folder}/tmc.db") as made:
        yield made


def _why(center: RunningCenter, *arguments: str) -> subprocess.CompletedProcess[str]:
    return center.run_admin("why", *arguments)


@pytest.fixture(scope="module")
def message_id(center: RunningCenter) -> str:
    with tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders:
        return orders.publish("order.paid", b"", key="paid-1")


def test_sentences_for_people(center: RunningCenter, message_id: str) -> None:
    done = _why(center, message_id)
    assert done.returncode == 0, done.stderr
    name, sentence, remedy = done.stdout.splitlines()
    assert name == f"message {message_id}"
    assert sentence == "coupons (default): Nobody reads this subscription's messages."
    assert remedy.strip() == Why.NO_CONSUMER.value


def test_names_for_programs(center: RunningCenter, message_id: str) -> None:
    found = json.loads(_why(center, "--topic", "order.paid", "--key", "paid-1", "--json").stdout)
    assert found["message_id"] == message_id
    (explanation,) = found["explanations"]
    assert (explanation["why"], explanation["app"]) == ("WHY_NO_CONSUMER", "coupons")


def test_a_timeline_for_people_and_for_programs(center: RunningCenter, message_id: str) -> None:
    done = center.run_admin("timeline", message_id)
    name, stored, submitted = done.stdout.splitlines()
    assert name == f"message {message_id}"
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} UTC"
    assert re.fullmatch(rf"{time}  Stored for orders \(default\)\.", stored)
    assert re.fullmatch(rf"{time}  Submitted \(1 subscriber\), decided by its producer\.", submitted)
    events = json.loads(center.run_admin("timeline", "--topic", "order.paid", "--key", "paid-1", "--json").stdout)[
        "events"
    ]
    assert [event["kind"] for event in events] == ["EVENT_KIND_PREPARED", "EVENT_KIND_DECIDED"]
    assert "be given, or topic and key" in center.run_admin("timeline").stderr


def test_lists_for_people_and_for_programs(center: RunningCenter, message_id: str) -> None:
    titles, message = center.run_admin("list-messages").stdout.splitlines()
    assert titles.split() == ["MESSAGE", "STATE", "PREPARED", "AGE", "TOPIC", "KEY"]
    assert re.fullmatch(rf"{message_id}  COMMITTED  .* UTC  \d+ (s|min)\s+order\.paid  paid-1", message)
    _, delivery = center.run_admin("list-consumptions", "--state", "scheduled", "--newest-first").stdout.splitlines()
    assert re.match(rf"{message_id}  coupons \(default\)  SCHEDULED  ", delivery)
    found = json.loads(center.run_admin("list-consumptions", "order.paid", "--json").stdout)["consumptions"]
    assert [each["message_id"] for each in found] == [message_id]


@pytest.mark.parametrize("what", ["list-messages", "list-consumptions"])
def test_lists_by_age(center: RunningCenter, message_id: str, what: str) -> None:
    assert message_id in center.run_admin(what, "--older-than", "1ms").stdout
    old = center.run_admin(what, "--older-than", "1 h")
    assert (old.returncode, old.stdout, old.stderr.strip()) == (0, "", "None.")
    assert "90s, 10m, 2h or 1d" in center.run_admin(what, "--older-than", "soon").stderr


def test_a_page_says_how_to_get_the_next(center: RunningCenter, message_id: str) -> None:
    page = center.run_admin("list-messages", "--page-size", "1")
    token = page.stderr.split()[-1]
    assert page.stderr.startswith("There are more: repeat the command with --page-token ")
    assert center.run_admin("list-messages", "--page-token", token).stdout == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["1-1-05-1"], "There is no such message"),
        (["nonsense"], "TOPIC-APP-SHARD-NUMBER"),
        (["--topic", "nothing", "--key", "k"], "There is no topic 'nothing'"),
        (["--topic", "order.paid", "--key", "nothing"], "There is no such message"),
        ([], "be given, or topic and key"),
        (["--topic", "order.paid"], "be given, or topic and key"),
        (["1-1-05-1", "--topic", "order.paid", "--key", "k"], "be given, or topic and key"),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(center: RunningCenter, arguments: list[str], sentence: str) -> None:
    done = _why(center, *arguments)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_an_overview_for_people_and_for_programs(center: RunningCenter, message_id: str) -> None:
    assert message_id
    topic, subscription = center.run_admin("overview").stdout.splitlines()
    assert re.fullmatch(r"order\.paid: 0 prepared, 0 undecided, 0 check failed(; \d+/min)?", topic)
    assert re.fullmatch(
        r"    coupons \(default\): 1 scheduled, 1 backlog \(oldest \d+ s\), 0 waiting, 0 failed", subscription
    )
    (found,) = json.loads(center.run_admin("overview", "--json").stdout)["topics"]
    assert found["subscriptions"][0]["backlog"] == "1"


@pytest.mark.parametrize(
    ("text", "ms"), [("", 0), ("90s", 90_000), ("10 m", 600_000), ("2h", 7_200_000), ("1d", 86_400_000)]
)
def test_ages_as_people_write_them(text: str, ms: int) -> None:
    assert duration_ms(text) == ms


@pytest.mark.parametrize(
    ("ms", "text"), [(-5, "0 s"), (59_999, "59 s"), (60_000, "1 min"), (7_200_000, "2 h"), (90_000_000, "1 d")]
)
def test_ages_are_in_the_largest_unit_that_fits(ms: int, text: str) -> None:
    assert age(ms) == text


def test_the_commands_that_help_can_be_copied(center: RunningCenter, message_id: str) -> None:
    center.run_admin("pause-topic", "order.paid", "--reason", "wrong prices")
    command = _why(center, message_id).stdout.splitlines()[-1].strip()
    assert command == "$ tmc admin resume-topic order.paid --reason '...'"
    assert center.run_admin(*shlex.split(command)[3:]).returncode == 0
    assert "order.paid: " in center.run_admin("overview").stdout
