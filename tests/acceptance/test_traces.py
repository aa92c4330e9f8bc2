"""Three processes under `opentelemetry-instrument`, and Zipkin: one trace from the order to the ack of its message."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tmc_storm.eventually import eventually
from tmc_storm.services.cache import cache
from tmc_storm.services.ports import end, free_port

pytestmark = pytest.mark.services
BIN = Path(sys.executable).parent
INSTRUMENTED = [str(BIN / "opentelemetry-instrument")]
PRODUCER = """
import sys, tmc_client as tmc
from opentelemetry import trace
with tmc.connect(sys.argv[1], app="orders") as center:
    with trace.get_tracer("shop").start_as_current_span("order 7"):
        message = center.prepare("order.paid", {"order": 7}, key="paid-7")
    center.submit(message)
"""
CONSUMER = """
import sys, tmc_client as tmc
with tmc.connect(sys.argv[1], app="coupons") as center:
    consumer = tmc.Consumer(center)
    @consumer.listener("order.paid")
    def give(paid: dict[str, int]) -> None:
        print(paid["order"], flush=True)
    consumer.run()
"""


class Zipkin:
    """A private one, in memory. `scripts/install-zipkin` downloads it."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        port = self.url.rpartition(":")[2]
        self._home = tempfile.TemporaryDirectory(prefix="tmc-zipkin-")
        self.process = subprocess.Popen(
            ["java", "-Xmx128m", "-jar", str(cache() / "zipkin.jar")],
            env=os.environ | {"QUERY_PORT": port, "STORAGE_TYPE": "mem"},
            cwd=self._home.name,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(lambda: self._get("/health") is not None)

    def _get(self, path: str) -> Any:
        """None: it does not answer yet."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return json.loads(answer.read())
        except (OSError, urllib.error.URLError):
            return None

    def trace_with(self, name: str) -> Mapping[str, Any]:
        """Spans by name, of the one trace that has a span of this name; {}: there is none yet."""
        for spans in self._get("/api/v2/traces?limit=100") or ():
            found = {span["name"]: span for span in spans}
            if name in found:
                return found
        return {}

    def stop(self) -> None:
        end(self.process, signal.SIGTERM)
        self._home.cleanup()


@pytest.fixture(scope="module")
def zipkin() -> Iterator[Zipkin]:
    running = Zipkin()
    yield running
    running.stop()


def test_zipkin_shows_one_trace_across_three_processes(zipkin: Zipkin, tmp_path: Path) -> None:
    port = free_port()
    exporting = os.environ | {
        "OTEL_TRACES_EXPORTER": "zipkin_json",
        "OTEL_EXPORTER_ZIPKIN_ENDPOINT": f"{zipkin.url}/api/v2/spans",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }

    def started(service: str, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*INSTRUMENTED, *command], env=exporting | {"OTEL_SERVICE_NAME": service}, cwd=tmp_path, **options
        )
        running.callback(end, process, signal.SIGTERM)
        return process

    with ExitStack() as running:
        started(
            "center", str(BIN / "tmc"), "dev", "--port", str(port), "--console-port", "-1", stderr=subprocess.DEVNULL
        )
        address = f"127.0.0.1:{port}"
        consumer = started("coupons", sys.executable, "-c", CONSUMER, address, stdout=subprocess.PIPE)
        listing = [str(BIN / "tmc"), "admin", "--address", address, "list-subscriptions"]
        eventually(lambda: b"coupons" in subprocess.run(listing, capture_output=True, check=False).stdout)
        producer = started("orders", sys.executable, "-c", PRODUCER, address)
        assert producer.wait(60) == 0
        assert consumer.stdout is not None
        running.enter_context(consumer.stdout)
        assert consumer.stdout.readline() == b"7\n"
        wanted = {
            "order 7",
            "prepare order.paid",
            "submit",
            "publish order.paid",
            "receive order.paid",
            "process order.paid",
        }
        eventually(
            lambda: {*wanted, "ack"} <= set(zipkin.trace_with("order 7")), describe=lambda: zipkin.trace_with("order 7")
        )
        spans = zipkin.trace_with("order 7")
    services = {name: spans[name]["localEndpoint"]["serviceName"] for name in (*wanted, "ack")}
    assert services == {
        "order 7": "orders",
        "prepare order.paid": "orders",
        "submit": "orders",
        "publish order.paid": "center",
        "receive order.paid": "coupons",
        "process order.paid": "coupons",
        "ack": "coupons",
    }
    assert spans["tmc.v1.messageservice/preparemany"]["traceId"] == spans["order 7"]["traceId"]
