"""Metrics as they are documented, and trace context from Prepare to the handler."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_server.app import DEV, CannotStart, Server
from tmc_server.config import Config
from tmc_server.metrics import METRICS
from tmc_server.store.tables import node_slot
from tmc_storm.eventually import eventually

PAGE = Path(__file__).parents[3] / "docs" / "telemetry.md"


def _scrape(port: int) -> dict[tuple[str, tuple[str, ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_page_lists_every_metric() -> None:
    listed = {
        (name, kind, tuple(filter(None, labels.split(", "))), text)
        for name, kind, labels, text in re.findall(
            r"^\| `(\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \|$", PAGE.read_text(), re.M
        )
    }
    every = {family.name: family for family in METRICS.registry.collect()}
    described = {name: family for name, family in every.items() if not name.startswith("process_")}
    assert {f"{name}_total" if family.type == "counter" else name for name, family in every.items()} >= set(
        re.findall(r"`(process_\w+)`", PAGE.read_text())
    )
    assert {(name, kind, text) for name, kind, _, text in listed} == {
        (f"{name}_total" if family.type == "counter" else name, family.type, family.documentation)
        for name, family in described.items()
    }
    for name, _, labels, _ in listed:
        attribute = getattr(METRICS, name.removeprefix("tmc_").removesuffix("_total"))
        attribute.labels(*labels) if labels else attribute.collect()  # raises for other labels


def test_a_life_is_counted(tmp_path) -> None:
    telemetry = {"listen": "127.0.0.1:0"}
    with RunningCenter(f"sqlite:///{tmp_path}/c.db", open_to_all=True, telemetry=telemetry) as center:
        port = center.server.metrics.port
        before = _scrape(port)
        with tmc.connect(center.address, app="orders") as orders, tmc.connect(center.address, app="coupons") as coupons:
            consumer = tmc.Consumer(coupons)

            @consumer.listener("metrics.topic")
            def handle(body: bytes) -> None:
                if body == b"bad":
                    raise tmc.Reject("bad")

            with consumer:
                center.subscribed()
                prepared = orders.prepare("metrics.topic", b"good", key="1")
                orders.submit(prepared)
                orders.publish("metrics.topic", b"bad", key="2")
                orders.rollback(orders.prepare("metrics.topic", b"never", key="3"))
                eventually(lambda: _scrape(port).get(("tmc_nacked_total", ("coupons", "metrics.topic"))))
                eventually(lambda: _scrape(port).get(("tmc_acked_total", ("coupons", "metrics.topic"))))
        after = _scrape(port)

    def grown(name: str, *values: str) -> float:
        labels = tuple(sorted(values))
        return after[name, labels] - before.get((name, labels), 0)

    assert grown("tmc_prepared_total", "metrics.topic") == 2
    assert grown("tmc_submitted_total", "metrics.topic") == 2
    assert grown("tmc_rolled_back_total", "metrics.topic") == 1
    assert grown("tmc_acked_total", "metrics.topic", "coupons") == 1
    assert grown("tmc_nacked_total", "metrics.topic", "coupons") == 1
    assert grown("tmc_call_seconds_count", "MessageService/PrepareMany", "OK") == 2
    assert grown("tmc_batch_operations_count") >= 5
    assert (after["tmc_leases_held", ()], after["tmc_servers_alive", ()]) == (32, 1)


def test_a_server_is_ready_while_it_serves(tmp_path: Path) -> None:
    listen = {"listen": "127.0.0.1:0"}
    with RunningCenter(f"sqlite:///{tmp_path}/c.db", open_to_all=True, telemetry=listen) as center:
        url = f"http://127.0.0.1:{center.server.metrics.port}/readyz"
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.read() == b"ready\n"
        assert center.server.metrics.is_ready
    assert not center.server.metrics.is_ready


def test_a_server_whose_metrics_port_is_taken_takes_up_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.db"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        sections = {"server": {"listen": "127.0.0.1:0"}, "store": {"catalog": f"sqlite:///{file}"}}
        config = Config.model_validate(sections | {"telemetry": {"listen": listen}})
        with pytest.raises(CannotStart, match=rf"Cannot listen on {listen} for metrics .* set \[telemetry\] listen"):
            asyncio.run(Server.started(config, DEV))
    assert not file.exists()  # no tables, no node slot, no leases that others would have to wait for


def test_a_server_whose_port_is_taken_says_which_setting_and_leaves_its_node_slot_free(tmp_path: Path) -> None:
    sections = {"store": {"catalog": f"sqlite:///{tmp_path}/c.db"}}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        config = Config.model_validate(sections | {"server": {"listen": listen}})
        with pytest.raises(
            CannotStart, match=rf"Cannot listen on {listen}: choose another address \(\[server\] listen"
        ):
            asyncio.run(Server.started(config, DEV))
    slot = sa.create_engine(sections["store"]["catalog"])
    with slot.connect() as connection:
        assert connection.execute(sa.select(node_slot.c.expires_ms)).scalars().all() == [0]
    slot.dispose()


def test_refused_calls_are_counted_by_their_status(tmp_path) -> None:
    telemetry = {"listen": "127.0.0.1:0"}
    with RunningCenter(f"sqlite:///{tmp_path}/c.db", open_to_all=True, telemetry=telemetry) as center:
        port = center.server.metrics.port
        key = ("tmc_call_seconds_count", ("MessageService/GetMessage", "NOT_FOUND"))
        before = _scrape(port).get(key, 0)
        with tmc.connect(center.address, app="orders") as orders, pytest.raises(tmc.NotFound):
            orders.get_message("1-1-01-1")
        assert _scrape(port)[key] == before + 1


def test_few_series_before_the_first_call_and_those_of_the_process(tmp_path) -> None:
    """In a process of its own: this one has served calls."""
    script = f"""
import urllib.request
from tests.support.center import RunningCenter
with RunningCenter("sqlite:///{tmp_path}/c.db", open_to_all=True, telemetry={{"listen": "127.0.0.1:0"}}) as center:
    with urllib.request.urlopen(f"http://127.0.0.1:{{center.server.metrics.port}}/metrics") as answer:
        print(answer.read().decode())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PAGE.parents[1]
    )
    series = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    assert len(series) < 150
    values = dict(line.rsplit(" ", 1) for line in series)
    assert float(values["process_resident_memory_bytes"]) > 0
    assert values["tmc_commit_waiting"] == "0.0"
    assert any(name.startswith("tmc_build_info{version=") and value == "1.0" for name, value in values.items())
    assert any(name.startswith("tmc_pool_in_use{database=") for name in values)
