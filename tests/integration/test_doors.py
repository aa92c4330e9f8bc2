"""The one-liners of docs/checks.md in the frameworks that they are for, and Consul's registration of a checks server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tests.support.consul import Consul
from tests.support.eventually import eventually
from tmc_client.checking import Checks
from tmc_server.discovery.consul import ConsulInstances
from tmc_server.domain.catalog import App

TOKEN = "the-token"
ASKED = {"items": [{"messageId": "1-1-05-1", "topic": "shop.paid", "messageKey": "k"}]}
ANSWER = [
    {"messageId": "1-1-05-1", "status": "UNKNOWN", "detail": "WRONG_LEDGER: the message was prepared with no ledger."}
]


@pytest.fixture
def checks(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checks]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(engine)
    made = tmc.connect("127.0.0.1:1", app="orders").checks(engine)
    monkeypatch.setattr(made.token, "_ask", lambda: TOKEN)
    yield made
    made.close()
    engine.dispose()


def test_flask(checks: Checks) -> None:
    import flask

    app = flask.Flask("shop")
    app.add_url_rule("/", view_func=lambda: "the shop")
    app.wsgi_app = checks.beside(app.wsgi_app)  # type: ignore[method-assign]
    client = app.test_client()
    assert client.get("/").data == b"the shop"
    assert client.post("/tmc/checks", json=ASKED).status_code == 403
    answer = client.post("/tmc/checks", json=ASKED, headers={"Tmc-Check-Token": TOKEN})
    assert answer.json == {"results": ANSWER}


def test_django(checks: Checks) -> None:
    import django
    from django.conf import settings
    from django.core.wsgi import get_wsgi_application
    from django.http import HttpResponse
    from django.urls import path
    from werkzeug.test import Client

    if not settings.configured:
        settings.configure(ROOT_URLCONF=(path("", lambda _request: HttpResponse("the shop")),), ALLOWED_HOSTS=["*"])
        django.setup()
    client = Client(checks.beside(get_wsgi_application()))
    assert client.get("/").data == b"the shop"
    answer = client.post("/tmc/checks", json=ASKED, headers={"Tmc-Check-Token": TOKEN})
    assert answer.json == {"results": ANSWER}


def test_fastapi(checks: Checks) -> None:
    from fastapi import FastAPI

    app = FastAPI()
    app.get("/")(lambda: "the shop")
    app.mount("/tmc", checks.asgi())
    assert _call(app, "GET", "/", b"", "") == (200, "the shop")
    assert _call(app, "POST", "/tmc/checks", json.dumps(ASKED).encode(), "wrong")[0] == 403
    assert _call(app, "POST", "/tmc/checks", json.dumps(ASKED).encode(), TOKEN) == (200, {"results": ANSWER})


def _call(app: Any, method: str, path: str, body: bytes, token: str) -> tuple[int, Any]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path, "raw_path": path,
        "root_path": "", "scheme": "http", "query_string": b"", "client": None, "server": None,
        "headers": [(b"tmc-check-token", token.encode())],
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(event.get("body", b"") for event in sent[1:]))


def test_an_address_that_means_nothing_elsewhere_is_refused(checks: Checks) -> None:
    with pytest.raises(ValueError, match="advertise="):
        checks.serve("0.0.0.0:0")
    checks.serve("0.0.0.0:0", advertise="10.0.0.5:50061").stop()


@pytest.mark.services
def test_a_checks_server_is_found_through_consul_by_its_tag(checks: Checks, consul: Consul) -> None:
    instances = ConsulInstances(consul.address, "")
    orders = App(1, "orders", "orders", "orders", "", "", ())
    with checks.serve("127.0.0.1:0", agent=consul.address, service="orders", tag="blue") as server:
        eventually(lambda: list(instances.addresses(orders, "blue")) == [server.address], seconds=20)
        assert list(instances.addresses(orders, "green")) == []
    eventually(lambda: list(instances.addresses(orders, "blue")) == [], seconds=20)
