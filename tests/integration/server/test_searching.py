"""Search by id and key, and failures by their errors, over the API and at the command line, on SQLite and MariaDB."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import tmc_client as tmc
from tests.conftest import SERVERS
from tests.integration.server.test_api import Api
from tests.support.center import RunningCenter
from tmc_common.protocol import admin_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

OTHER = "order.sent"


class Setting:
    """Messages of two topics, one of them in all shards; five deliveries that failed with two errors."""

    def __init__(self, center: RunningCenter, channel: grpc.Channel) -> None:
        self.center, self.api = center, Api(center, channel)
        center.subscribe(OTHER, "coupons", topic_settings={"spread": 32})
        self.ids: dict[str, str] = {}
        connect = {app: tmc.connect(center.address, app=app, key=center.keys[app]) for app in ("orders", "coupons")}
        with connect["orders"] as orders, connect["coupons"] as coupons:
            consumer = tmc.Consumer(coupons)

            @consumer.listener("order.paid")
            def fail(body: bytes, message: tmc.Message) -> None:
                if message.key.startswith("bad"):
                    what = "no stock" if message.key < "bad-3" else "no such customer"
                    raise tmc.Reject(f"{what} for {message.key}")

            with consumer:
                for key in ("a-1", "a-2", "b-1", "bad-0", "bad-1", "bad-2", "bad-3", "bad-4"):
                    self.ids[key] = orders.publish("order.paid", b"secret", key=key)
                for key in ("a-1", "a-3", "A-1"):
                    self.ids[f"{OTHER} {key}"] = orders.publish(OTHER, b"secret", key=key)
                with tmc.connect(center.address, app="orders", key=center.keys["orders"], tag="staging") as staging:
                    self.ids["staging"] = staging.publish(OTHER, b"secret", key="a-1")
                eventually(lambda: sum(group.count for group in self.failures().groups) == 5)

    def search(self, text: str, **more: Any) -> Any:
        return self.api("AdminService/SearchMessages", admin_pb2.SearchMessagesRequest(text=text, **more))

    def failures(self, **more: Any) -> Any:
        return self.api("AdminService/ListFailureGroups", admin_pb2.ListFailureGroupsRequest(**more))


@pytest.fixture(
    scope="module", params=["sqlite", *(pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in SERVERS)]
)
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('searching')}/tmc.db"
    else:
        server: MariaDB | PostgreSQL = request.getfixturevalue(request.param)
        url = server.create("tmc_searching")
    with RunningCenter(url) as center, grpc.insecure_channel(center.address) as channel:
        yield Setting(center, channel)


def _keys(answer: Any) -> list[tuple[str, str]]:
    return [(message.topic, message.key) for message in answer.messages]


def test_by_id(setting: Setting) -> None:
    (found,) = setting.search(setting.ids["b-1"]).messages
    assert (found.message_id, found.key, found.body) == (setting.ids["b-1"], "b-1", b"")
    assert _keys(setting.search(setting.ids["b-1"], topic=OTHER)) == []
    assert _keys(setting.search("1-1-05-1")) == []


def test_by_key_in_all_topics_and_environments(setting: Setting) -> None:
    found = setting.search("a-1")
    ids = [setting.ids[name] for name in ("staging", f"{OTHER} a-1", "a-1")]
    assert [message.message_id for message in found.messages] == ids  # the newest first
    assert not any(message.body for message in found.messages)
    assert _keys(setting.search("a-1", topic="order.paid")) == [("order.paid", "a-1")]
    assert _keys(setting.search("a-")) == []
    assert _keys(setting.search("A-1")) == [(OTHER, "A-1")]


def test_by_the_beginning_of_a_key_in_one_topic(setting: Setting) -> None:
    expected = [(OTHER, "a-1"), (OTHER, "a-1"), (OTHER, "a-3")]
    assert _keys(setting.search("a*", topic=OTHER)) == expected
    refused = setting.search("a*")
    assert refused == ("INVALID_ARGUMENT", "FIELD_INVALID", "topic")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pages(setting: Setting, size: int) -> None:
    found, token = [], ""
    while True:
        page = setting.search("bad-*", topic="order.paid", page_size=size, page_token=token)
        found += [message.key for message in page.messages]
        token = page.next_page_token
        if not token:
            break
    assert found == [f"bad-{number}" for number in range(5)]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"text": ""}, "text"),
        ({"text": "*"}, "text"),
        ({"text": "x" * 129}, "text"),
        ({"text": "x", "page_token": "x"}, "page_token"),
        ({"text": "x", "page_token": "%%"}, "page_token"),
        ({"text": "x", "page_token": "_w=="}, "page_token"),
        ({"text": "x", "page_token": "\U0001f600"}, "page_token"),
        ({"text": "x", "page_size": 1001}, "page_size"),
    ],
)
def test_what_cannot_be_searched_is_refused(setting: Setting, request_: dict[str, Any], field: str) -> None:
    assert setting.search(**request_) == ("INVALID_ARGUMENT", "FIELD_INVALID", field)


def test_failures_with_the_same_error_are_one_group(setting: Setting) -> None:
    answer = setting.failures()
    assert [(group.count, group.topic, group.app, group.tag) for group in answer.groups] == [
        (3, "order.paid", "coupons", "default"),
        (2, "order.paid", "coupons", "default"),
    ]
    first, second = answer.groups
    assert ("no stock" in first.error, "no such customer" in second.error) == (True, True)
    assert (sum(first.per_minute), len(first.per_minute), answer.more) == (3, 60, False)
    assert first.first_ms <= first.last_ms <= answer.now_ms
    wanted = admin_pb2.ListConsumptionsRequest(topic="order.paid", fingerprint=first.fingerprint)
    rows = setting.api("AdminService/ListConsumptions", wanted).consumptions
    assert first.message_id in {row.message_id for row in rows}
    assert len(rows) == 3


def test_failures_of_one_subscriber(setting: Setting) -> None:
    assert len(setting.failures(topic="order.paid", app="coupons", tag="default").groups) == 2
    assert len(setting.failures(app="coupons", tag="staging").groups) == 0
    assert len(setting.failures(topic=OTHER).groups) == 0
    short = setting.failures(limit=1)
    assert (len(short.groups), short.more) == (1, True)
    assert setting.failures(tag="default") == ("INVALID_ARGUMENT", "FIELD_INVALID", "tag")
    assert setting.failures(limit=1001) == ("INVALID_ARGUMENT", "FIELD_INVALID", "limit")


def test_at_the_command_line(setting: Setting) -> None:
    run = setting.center.run_admin
    assert setting.ids["b-1"] in run("search", "b-1").stdout
    assert "topic must be given" in run("search", "b*").stderr
    shown = run("failures").stdout.splitlines()
    assert shown[0].startswith("3  order.paid, coupons (default): ")
    assert "no stock for bad-" in shown[1]
    again = shown[2].split()
    assert again[:3] == ["tmc", "admin", "bulk"]
    assert "3 deliveries" in (dry := run(*again[2:])).stdout + dry.stderr


def test_a_watched_overview_is_shown_again_until_it_is_interrupted(setting: Setting) -> None:
    environment = os.environ | {"TMC_ADDRESS": setting.center.address, "TMC_ADMIN_TOKEN": setting.center.token}
    command = [str(Path(sys.executable).parent / "tmc"), "admin", "overview", "--watch", "0.1"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        shown = [watching.stdout.readline() for _ in range(9)]
        watching.terminate()
        watching.stdout.read()
    assert sum(line.startswith("order.paid: ") for line in shown) >= 2
    assert "\033" not in "".join(shown)  # not a terminal
    assert watching.returncode == -signal.SIGTERM
