"""The one-liners of docs/checks.md in the frameworks that they are for, and Consul's registration of a checks server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import grpc_testing
import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tests.support import django_site
from tmc_client.checks.answers import Checks
from tmc_common.protocol import check_pb2
from tmc_server.discovery.consul import ConsulInstances
from tmc_server.domain.catalog import App
from tmc_storm.eventually import eventually
from tmc_storm.services.consul import Consul

TOKEN = "the-token"
ASKED = {"items": [{"messageId": "1-1-05-1", "topic": "shop.paid", "messageKey": "k"}]}
ANSWER = [
    {
        "messageId": "1-1-05-1",
        "status": "UNKNOWN",
        "detail": "WRONG_LEDGER: the message was prepared with no ledger.",
        "unknownReason": "WRONG_LEDGER",
    }
]


@pytest.fixture
def checks(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checks]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(engine)
    made = tmc.connect("127.0.0.1:1", app="orders").checks(engine)
    monkeypatch.setattr(made.token, "_ask", lambda *_: TOKEN)
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
    from django.core.wsgi import get_wsgi_application
    from werkzeug.test import Client

    django_site.set_up()
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
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path,
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "client": None,
        "server": None,
        "headers": [(b"tmc-check-token", token.encode())],
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(event.get("body", b"") for event in sent[1:]))


class _Counting:
    """A body, and how much of it was read."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.read_bytes = 0

    def read(self, size: int = -1) -> bytes:
        assert size >= 0, "read to the end of a connection that stays open"
        self.read_bytes += size
        return self._body[:size]


def _wsgi(checks: Checks, method: str, body: bytes, token: str, **environ: str) -> tuple[int, int]:
    """Returns: status, and how many bytes of the body were asked for."""
    seen: list[str] = []
    stream = _Counting(body)
    called = {
        "REQUEST_METHOD": method,
        "QUERY_STRING": "",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": stream,
        "HTTP_TMC_CHECK_TOKEN": token,
    } | environ
    answer = b"".join(checks.wsgi()(called, lambda status, _headers: seen.append(status)))
    assert json.loads(answer)
    return int(seen[0].split()[0]), stream.read_bytes


def _asgi(checks: Checks, method: str, parts: list[bytes], token: str, query: bytes = b"") -> tuple[int, int]:
    """Returns: status, and how many parts of the body were asked for."""
    sent: list[Any] = []
    waiting = list(parts)

    async def receive() -> Any:
        part = waiting.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(waiting)}

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {
        "type": "http",
        "method": method,
        "query_string": query,
        "headers": [(b"tmc-check-token", token.encode("latin-1"))],
    }
    asyncio.run(checks.asgi()(scope, receive, send))
    return sent[0]["status"], len(parts) - len(waiting)


DEEP = b'{"items": ' + b"[" * 100_000
ITEM = {"messageId": "1-1-05-1", "topic": "shop.paid", "messageKey": "k"}
JUNK = [
    DEEP,
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b"",
    b"junk",
    b"[]",
    b"5",
    b'{"items": 5}',
    b'{"items": "abc"}',
    b'{"items": {"a": 1}}',
    b'{"items": [1]}',
    b'{"items": [[[]]]}',
    b"\xff\xfe",
    *[
        json.dumps({"items": [ITEM | {name: value}]}).encode()
        for name in ("messageId", "topic", "messageKey", "attemptId", "ledgerId", "createdMs")
        for value in (None, [], {}, True, 1.5, -1, 2**70, "x" * 5_000, "a\0b", [[[]]])
        if not (name == "createdMs" and value == 1)
    ],
    json.dumps({"items": [ITEM] * 1_001}).encode(),
    b'{"items": [{"messageId": "1", "topic": "t", "messageKey": "k", "createdMs": ' + b"9" * 5_000 + b"}]}",
]


@pytest.mark.parametrize("body", JUNK, ids=range(len(JUNK)))
def test_junk_of_somebody_with_the_token_is_refused_and_never_an_exception(checks: Checks, body: bytes) -> None:
    assert _wsgi(checks, "POST", body, TOKEN)[0] == 400
    assert _asgi(checks, "POST", [body], TOKEN)[0] == 400


def test_the_body_of_a_stranger_is_not_read(checks: Checks) -> None:
    for token in ("", "wrong", "\xff"):
        assert _wsgi(checks, "POST", DEEP, token) == (403, 0)
        assert _asgi(checks, "POST", [DEEP, DEEP], token) == (403, 0)


def test_a_body_that_is_too_long_is_refused_before_it_is_read(checks: Checks) -> None:
    assert _wsgi(checks, "POST", b"x" * 10, TOKEN, CONTENT_LENGTH=str(5 << 20)) == (413, 0)
    for length in ("-5", "abc", "1e3", "9" * 40, "\u0665"):
        assert _wsgi(checks, "POST", b"x" * 10, TOKEN, CONTENT_LENGTH=length) == (400, 0)
    assert _asgi(checks, "POST", [b"x" * (1 << 20)] * 9, TOKEN) == (413, 5)


@pytest.mark.parametrize(
    "query", [b"", b"messageKey", b"a=b", b"&&&", b"messageKey=" + b"k" * 5_000, b"a=1&" * 50 + b"a=1"]
)
def test_a_get_that_is_no_question(checks: Checks, query: bytes) -> None:
    assert _asgi(checks, "GET", [b""], TOKEN, query)[0] == 400
    assert _asgi(checks, "PUT", [b""], TOKEN, query)[0] == 405


def _servicer_call(checks: Checks, method: str, request: Any, token: str) -> tuple[Any, grpc.StatusCode, str]:
    """Without a network: grpcio-testing plays the server."""
    service = check_pb2.DESCRIPTOR.services_by_name["CheckService"]
    server = grpc_testing.server_from_dictionary({service: checks.servicer()}, grpc_testing.strict_real_time())
    call = server.invoke_unary_unary(service.methods_by_name[method], ((("tmc-check-token", token)),), request, None)
    response, _, code, details = call.termination()
    return response, code, details


def test_the_servicer_looks_at_the_token_before_the_questions(checks: Checks) -> None:
    asked = check_pb2.CheckRequest(message_id="1-1-05-1", topic="shop.paid", key="k")
    many = check_pb2.CheckManyRequest(items=[asked] * 1_001)
    assert _servicer_call(checks, "CheckMany", many, "wrong")[1] is grpc.StatusCode.PERMISSION_DENIED
    assert _servicer_call(checks, "CheckMany", many, TOKEN)[1] is grpc.StatusCode.INVALID_ARGUMENT
    response, code, _ = _servicer_call(checks, "Check", asked, TOKEN)
    assert (code, response.message_id) == (grpc.StatusCode.OK, "1-1-05-1")


def test_the_checks_server_parses_nothing_of_a_stranger(checks: Checks) -> None:
    with checks.serve() as server, grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/tmc.v1.CheckService/CheckMany")
        for token, code in (("wrong", grpc.StatusCode.PERMISSION_DENIED), (TOKEN, grpc.StatusCode.INVALID_ARGUMENT)):
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\xff\xff\xff", metadata=(("tmc-check-token", token),), timeout=30)
            assert caught.value.code() is code


def test_connections_that_say_nothing_give_their_handles_back(checks: Checks) -> None:
    with checks.serve() as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        for connection in silent:
            connection.settimeout(60)
            while connection.recv(4_096):
                """Its own settings, and then the end."""
            connection.close()


def test_strangers_do_not_wait_for_the_center_each(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(checks.token, "_ask", lambda *_: asked.append(1) or TOKEN)
    for _ in range(100):
        assert _wsgi(checks, "POST", b"{}", "wrong") == (403, 0)
    assert len(asked) == 1


def test_an_address_that_means_nothing_elsewhere_is_refused(checks: Checks) -> None:
    with pytest.raises(ValueError, match="advertise="):
        checks.serve("0.0.0.0:0")
    checks.serve("0.0.0.0:0", advertise="10.0.0.5:50061").stop()


@pytest.mark.services
def test_a_checks_server_is_found_through_consul_by_its_tag(checks: Checks, consul: Consul) -> None:
    instances = ConsulInstances(consul.address, "")
    orders = App(
        number=1, id="orders", service_name="orders", biz_id="orders", alert_email="", alert_phone="", key_hashes=()
    )
    with checks.serve("127.0.0.1:0", agent=consul.address, service="orders", tag="blue") as server:
        eventually(lambda: [each.address for each in instances.instances(orders, "blue")] == [server.address])
        assert list(instances.instances(orders, "green")) == []
    eventually(lambda: list(instances.instances(orders, "blue")) == [])
