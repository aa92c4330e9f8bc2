"""The storm's services that speak HTTP themselves: what they take for an answer, and what they book."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
import standardwebhooks

from tmc_storm.shop import books
from tmc_storm.shop.orders import Order
from tmc_storm.shop.over_http import HttpPublisher, RefusedOverHttp
from tmc_storm.shop.settings import ShopSettings
from tmc_storm.shop.webhook import Receiver

ORDER = Order(key="producer-0.1.http.1", topic=books.PAID)
STORED = (200, {"messageId": "1-1-16-1", "state": "MESSAGE_STATE_COMMITTED"})
BUSY, LOCKED = (503, {"reason": "SHUTTING_DOWN"}), (409, {"reason": "ROW_LOCKED"})
ONE, BATCH = "application/cloudevents+json", "application/cloudevents-batch+json"
KEY = b"k" * 32
FINAL = (409, {"reason": "KEY_IN_PROGRESS"})


class _Center(BaseHTTPRequestHandler):
    answers: ClassVar[list[tuple[int, dict[str, str]]]] = []
    attempts: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.attempts.append(request["attemptId"])
        status, said = self.answers.pop(0)
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def publisher() -> Iterator[HttpPublisher]:
    with HTTPServer(("127.0.0.1", 0), _Center) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        made = HttpPublisher(["127.0.0.1:1", f"127.0.0.1:{server.server_port}"], "storm-orders", "key")
        yield made
        made.close()
        server.shutdown()


def test_the_same_attempt_is_repeated_until_it_is_stored(publisher: HttpPublisher) -> None:
    _Center.attempts.clear()
    _Center.answers[:] = [BUSY, LOCKED, STORED]
    publisher.publish(ORDER)
    assert (len(_Center.attempts), len(set(_Center.attempts))) == (3, 1)


@pytest.mark.parametrize(
    "answer",
    [FINAL, (400, {"reason": "FIELD_INVALID"}), (200, {"state": "x", "messageId": "1"}), (200, {}), (502, {})],
)
def test_other_answers_are_noted(publisher: HttpPublisher, answer: tuple[int, dict[str, str]]) -> None:
    _Center.answers[:] = [answer]
    with pytest.raises(RefusedOverHttp, match=str(answer[0])):
        publisher.publish(ORDER)


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    settings = ShopSettings(
        name="receiver",
        app=books.WEB_APP,
        key="",
        address="",
        database=f"sqlite:///{tmp_path}/web.db",
        folder=str(tmp_path),
        webhook_keys={topic: KEY.hex() for topic in books.WEBHOOKS[books.WEB_APP]},
    )
    books.open_books(settings.database)
    made = Receiver(settings)
    yield made
    made.close()


def _event(number: int, *, refuse: bool = False, attempt: int = 1) -> dict[str, Any]:
    key = f"producer-0.1.block.{number}"
    data = books.sealed(books.PAID, key, {"refuse": refuse, "number": 0, "text": ""})
    return {"id": f"1-1-16-{number}", "type": books.PAID, "subject": key, "tmcattempt": attempt, "data": data}


def _post(receiver: Receiver, content: object, kind: str, method: str = "POST", key: bytes = KEY) -> int:
    answers: list[dict[str, Any]] = []
    body = json.dumps(content)
    sent = datetime.now(UTC)
    signature = standardwebhooks.Webhook(key).sign("msg_1", sent, body)
    headers = {
        "content-type": kind,
        "webhook-id": "msg_1",
        "webhook-timestamp": str(int(sent.timestamp())),
        "webhook-signature": signature,
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body.encode()}

    async def send(message: dict[str, Any]) -> None:
        answers.append(message)

    scope = {
        "method": method,
        "path": "/one" if kind == ONE else "/batch",
        "headers": [(name.encode(), text.encode()) for name, text in headers.items()],
    }
    asyncio.run(receiver(scope, receive, send))
    return int(answers[0]["status"])


def _effects(tmp_path: Path) -> Sequence[tuple[str, bool]]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/web.db")
    with engine.connect() as connection:
        found = [(row.message_key, row.is_intact) for row in connection.execute(sa.select(books.effect)).all()]
    engine.dispose()
    return found


def test_a_message_that_comes_again_has_one_effect(receiver: Receiver, tmp_path: Path) -> None:
    assert _post(receiver, _event(1), ONE) == 204
    assert _post(receiver, [_event(1), _event(2)], BATCH) == 204
    assert _effects(tmp_path) == [("producer-0.1.block.1", True), ("producer-0.1.block.2", True)]


def test_a_batch_with_a_refused_message_comes_again_one_by_one(receiver: Receiver, tmp_path: Path) -> None:
    assert _post(receiver, [_event(1), _event(2, refuse=True)], BATCH) == 422
    assert _effects(tmp_path) == []
    assert not (tmp_path / f"{books.WEB_APP}.refused").exists()
    assert _post(receiver, [_event(2, refuse=True)], BATCH) == 422
    assert (tmp_path / f"{books.WEB_APP}.refused").read_text() == "1-1-16-2\n"


def test_a_handler_that_fails_once_is_asked_again(receiver: Receiver) -> None:
    assert _post(receiver, _event(77), ONE) == 500
    assert _post(receiver, _event(77, attempt=2), ONE) == 204


@pytest.mark.parametrize(
    ("content", "kind", "method"),
    [
        ([_event(1)], ONE, "POST"),
        (_event(1), BATCH, "POST"),
        (_event(1), "text/plain", "POST"),
        (_event(1), ONE, "PUT"),
    ],
)
def test_what_is_no_webhook_of_the_center_is_refused(
    receiver: Receiver, tmp_path: Path, content: object, kind: str, method: str
) -> None:
    assert _post(receiver, content, kind, method) == 400
    assert _effects(tmp_path) == []


def test_what_another_key_has_signed_is_refused(receiver: Receiver, tmp_path: Path) -> None:
    assert _post(receiver, _event(1), ONE, key=bytes(32)) == 401
    assert _effects(tmp_path) == []


def test_a_database_that_is_away_is_said(receiver: Receiver, tmp_path: Path) -> None:
    (tmp_path / "web.db").unlink()
    (tmp_path / "web.db").mkdir()
    receiver.close()
    assert _post(receiver, _event(1), ONE) == 503
