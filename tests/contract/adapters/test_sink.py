"""What every sink of alerts promises: an alert of any kind is taken, and a sink that cannot take one says so."""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.support.outlet import SomeCatalog
from tests.support.ports import free_port
from tmc_server.alerts.log import LogSink
from tmc_server.alerts.webhook import WebhookSink
from tmc_server.domain.ports.alerts import Alert, AlertSink

CATALOG = SomeCatalog("coupons", 1).current
HOSTILE = "</script>\n\x1b[31m\u202eolleh {0} %s"


def an_alert(**changes: object) -> Alert:
    values = {
        "id": 1,
        "kind": "delivery failed",
        "topic": 1,
        "shard": 5,
        "number": 77,
        "subscription": 1,
        "attempt": 3,
        "detail": "given up",
        "created_ms": 1_800_000_000_000,
    }
    return Alert(**(values | changes))


class SinkContract(ABC):
    @abstractmethod
    def sink(self) -> AlertSink:
        """A new one."""

    @abstractmethod
    def taken(self) -> list[str]:
        """What arrived behind it, as text."""

    def test_an_alert_arrives_with_its_message_topic_and_subscriber(self) -> None:
        self.sink().send(an_alert(), CATALOG)
        (text,) = self.taken()
        for part in ("delivery failed", "1-1-05-77", "t1", "coupons", "given up"):
            assert part in text

    def test_a_notice_of_many_says_how_many(self) -> None:
        first = 1_800_000_000_000
        self.sink().send(an_alert(count=17, first_ms=first, last_ms=first + 5000, samples=((5, 77),)), CATALOG)
        assert "17" in self.taken()[0]

    @pytest.mark.parametrize(
        "changes", [{"number": 0, "shard": 0}, {"subscription": 0}, {"topic": 0, "subscription": 0}, {"topic": 999}]
    )
    def test_what_the_catalog_does_not_know_is_no_failure(self, changes: dict[str, int]) -> None:
        self.sink().send(an_alert(**changes), CATALOG)
        assert len(self.taken()) == 1

    def test_hostile_text_is_text(self) -> None:
        self.sink().send(an_alert(detail=HOSTILE), CATALOG)
        assert len(self.taken()) == 1


class TestLog(SinkContract):
    @pytest.fixture(autouse=True)
    def records(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        self.caplog = caplog

    def sink(self) -> AlertSink:
        return LogSink()

    def taken(self) -> list[str]:
        return [record.getMessage() for record in self.caplog.records if record.name == "tmc.alert"]


class TestWebhook(SinkContract):
    @pytest.fixture(autouse=True)
    def receiver(self) -> Iterator[None]:
        bodies: list[bytes] = []

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.bodies = bodies
        server = HTTPServer(("127.0.0.1", 0), Receiver)
        self.url = f"http://127.0.0.1:{server.server_port}/alerts"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield
        server.shutdown()
        thread.join()
        server.server_close()

    def sink(self) -> AlertSink:
        return WebhookSink(self.url)

    def taken(self) -> list[str]:
        return [json.dumps(json.loads(body), ensure_ascii=False) for body in self.bodies]

    def test_one_that_cannot_take_it_says_so(self) -> None:
        with pytest.raises(OSError, match="cannot be reached"):
            WebhookSink(f"http://127.0.0.1:{free_port()}/").send(an_alert(), CATALOG)
