"""The calls as JSON over HTTP: what the door itself answers, and that it stands behind the same edge as gRPC."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import socket
import sqlite3
import ssl
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import openapi_spec_validator
import pytest
from google.protobuf import json_format

from tests.support.center import RunningCenter
from tests.support.certificates import Authority
from tests.support.metrics import value
from tmc_common import http_connections
from tmc_common.protocol import message_pb2, message_pb2_grpc
from tmc_server.app.maintenance import CannotStart
from tmc_server.http.door import OPENAPI_PATH, document
from tmc_server.metrics import METRICS
from tmc_server.requests.caller import Caller
from tmc_server.rpc import doorkeeper
from tmc_server.rpc.message_service import MessageServicer
from tmc_server.rpc.server import SERVICES
from tmc_storm.eventually import eventually

HTTP = {"http": {"listen": "127.0.0.1:0"}}
DOCUMENT: dict[str, Any] = json.loads(document())
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def _url(center: RunningCenter, scheme: str = "http") -> str:
    http = center.server.parts.http
    assert http is not None
    return f"{scheme}://127.0.0.1:{http.port}"


def _attempt() -> str:
    return base64.b64encode(os.urandom(16)).decode()


def _message(key: str, **more: object) -> dict[str, object]:
    return {"topic": "order.paid", "key": key, "body": "e30=", "attemptId": _attempt(), **more}


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("http")
    with RunningCenter(f"sqlite:///{folder}/c.db", **HTTP) as made:
        yield made


@pytest.fixture
def orders(center: RunningCenter) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=_url(center), headers=dict(center.as_app("orders")), timeout=60) as client:
        yield client


class TestDocument:
    def test_it_is_valid(self) -> None:
        openapi_spec_validator.validate(DOCUMENT)

    def test_it_has_every_rpc_but_the_streams(self) -> None:
        operations = {each["post"]["operationId"] for each in DOCUMENT["paths"].values()}
        assert operations == {
            f"{service.name}.{method.name}"
            for service in SERVICES.values()
            for method in service.methods
            if not method.server_streaming
        }

    def test_its_names_are_those_that_answers_have(self, center: RunningCenter, orders: httpx.Client) -> None:
        orders.post("/v1/messages:publish", json=_message("names", contentType="a/b", delayMs=5)).raise_for_status()
        found = orders.post("/v1/messages:getMessage", json={"topic": "order.paid", "key": "names"}).json()
        assert set(found) <= set(DOCUMENT["components"]["schemas"]["Message"]["properties"])
        assert (found["contentType"], found["delayMs"], found["body"]) == ("a/b", "5", "e30=")
        assert found["state"] in DOCUMENT["components"]["schemas"]["MessageState"]["enum"]

    def test_it_is_served_without_a_key(self, center: RunningCenter) -> None:
        assert httpx.get(_url(center) + OPENAPI_PATH).content == document()


class TestWhatTheDoorAnswers:
    def test_a_transaction(self, orders: httpx.Client) -> None:
        prepared = orders.post("/v1/messages:prepare", json=_message("whole"))
        assert (prepared.status_code, prepared.json()["state"]) == (200, "MESSAGE_STATE_PREPARED")
        submitted = orders.post("/v1/messages:submit", json={"messageId": prepared.json()["messageId"]})
        assert submitted.json() == {**prepared.json(), "state": "MESSAGE_STATE_COMMITTED"}

    def test_a_batch_with_an_item_that_is_refused(self, orders: httpx.Client) -> None:
        items = [_message(f"batch-{number}") for number in range(999)] + [_message("")]
        answer = orders.post("/v1/messages:publishMany", json={"items": items})
        *good, bad = answer.json()["results"]
        assert {each["state"] for each in good} == {"MESSAGE_STATE_COMMITTED"}
        assert (bad["error"]["reason"], bad["error"]["field"]) == ("FIELD_INVALID", "key")

    def test_the_trace_in_its_headers_belongs_to_the_message(self, orders: httpx.Client) -> None:
        orders.post("/v1/messages:publish", json=_message("traced"), headers={"traceparent": TRACE}).raise_for_status()
        found = orders.post("/v1/messages:getMessage", json={"topic": "order.paid", "key": "traced"}).json()
        assert found["headers"]["traceparent"] == TRACE

    @pytest.mark.parametrize(
        ("path", "given", "status", "reason"),
        [
            ("messages:prepare", _message("a b\n"), 400, "FIELD_INVALID"),
            ("messages:prepare", {"topick": "order.paid"}, 400, "MALFORMED_REQUEST"),
            ("messages:prepare", {"delayMs": "soon"}, 400, "MALFORMED_REQUEST"),
            ("messages:prepare", {"delayMs": 10**30}, 400, "MALFORMED_REQUEST"),
            ("messages:prepare", {"attemptId": "short"}, 400, "MALFORMED_REQUEST"),
            ("messages:prepare", b'{"key": "\\ud800"}', 400, "MALFORMED_REQUEST"),
            ("messages:prepare", b'{"key": "\xff"}', 400, "MALFORMED_REQUEST"),
            ("messages:prepare", ["topic"], 400, "MALFORMED_REQUEST"),
            ("messages:prepare", b"null", 400, "MALFORMED_REQUEST"),
            ("messages:prepare", b"", 400, "MALFORMED_REQUEST"),
            ("messages:prepare", _message("there", topic="nowhere"), 404, "TOPIC_UNKNOWN"),
            ("messages:submit", {}, 400, "FIELD_INVALID"),
            ("messages:getMessage", {"topic": "order.paid", "key": "nowhere"}, 404, "MESSAGE_UNKNOWN"),
            ("admin:listTopics", {}, 401, "ADMIN_ONLY"),
            ("messages:rollback", _message("done"), 400, "MALFORMED_REQUEST"),
        ],
    )
    def test_a_refusal_is_a_problem_with_its_reason(
        self, orders: httpx.Client, path: str, given: object, status: int, reason: str
    ) -> None:
        body = given if isinstance(given, bytes) else json.dumps(given).encode()
        answer = orders.post(f"/v1/{path}", content=body, headers={"content-type": "application/json"})
        problem = answer.json()
        assert (answer.status_code, problem["status"], problem["reason"]) == (status, status, reason)
        assert answer.headers["content-type"] == "application/problem+json"
        assert problem["detail"].endswith(".")
        assert set(problem) <= set(DOCUMENT["components"]["schemas"]["Problem"]["properties"])

    def test_a_conflict_names_the_message_that_is_in_the_way(self, orders: httpx.Client) -> None:
        first = orders.post("/v1/messages:publish", json=_message("once"))
        second = orders.post("/v1/messages:publish", json=_message("once"))
        assert (second.status_code, second.json()["reason"]) == (409, "KEY_COMMITTED")
        assert second.json()["messageId"] == first.json()["messageId"]

    @pytest.mark.parametrize(
        ("method", "path", "headers", "status"),
        [
            ("POST", "/v1/messages:produce", {}, 404),
            ("POST", "/", {}, 404),
            ("GET", "/v1/messages:prepare", {}, 405),
            ("OPTIONS", "/v1/messages:prepare", {"origin": "https://a.page"}, 405),
            ("POST", "/healthz", {}, 405),
            ("POST", "/v1/messages:prepare", {"content-type": "text/plain"}, 415),
            ("POST", "/v1/messages:prepare", {"content-type": "application/x-www-form-urlencoded"}, 415),
            ("POST", "/v1/messages:prepare", {"content-encoding": "gzip"}, 415),
        ],
    )
    def test_what_is_no_call_is_refused_by_the_door(
        self, orders: httpx.Client, method: str, path: str, headers: Mapping[str, str], status: int
    ) -> None:
        answer = orders.request(method, path, headers={"content-type": "application/json", **headers})
        assert (answer.status_code, answer.json()["status"]) == (status, status)
        assert answer.json()["detail"].endswith(".")
        assert "reason" not in answer.json()

    def test_json_that_would_become_far_larger_is_not_parsed(self, orders: httpx.Client) -> None:
        json_header = {"content-type": "application/json"}
        for bomb in (
            b'{"items":[' + b"{}," * 2_000_000 + b"{}]}",
            b"[" * 90_000,
            b'{"delayMs":' + b"9" * 90_000 + b"}",
            b'{"topic":"a","topic":"b"}',
        ):
            answer = orders.post("/v1/messages:prepareMany", content=bomb, headers=json_header)
            assert (answer.status_code, answer.json()["reason"]) == (400, "MALFORMED_REQUEST")

    def test_no_request_is_longer_than_the_limit(self, center: RunningCenter, orders: httpx.Client) -> None:
        part = b" " * (1 << 20)
        answer = orders.post(
            "/v1/messages:prepare",
            content=(part for _ in range(30)),  # chunked: no length is announced
            headers={"content-type": "application/json"},
        )
        assert (answer.status_code, answer.json()["reason"]) == (400, "MALFORMED_REQUEST")
        assert "at most" in answer.json()["detail"]
        with closing(_raw(center, dict(center.as_app("orders")), 1 << 40)) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 413 ")

    def test_operators_send_nothing_that_is_large(self, center: RunningCenter) -> None:
        with closing(_raw(center, dict(center.operator), 2 << 20, path="admin:listTopics")) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 413 ")

    def test_a_length_and_chunks_are_refused(self, center: RunningCenter) -> None:
        both = dict(center.as_app("orders")) | {"Transfer-Encoding": "chunked"}
        with closing(_raw(center, both, 5, b"2\r\n{}\r\n0\r\n\r\n", "messages:describeChecks")) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 400 ")

    def test_it_says_whether_it_serves(self, orders: httpx.Client) -> None:
        assert orders.get("/healthz").json() == {"status": "SERVING"}
        assert orders.head("/healthz").status_code == 200

    def test_a_fault_while_answering_has_a_correlation_id(
        self, orders: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(*_: Any, **_named: Any) -> str:
            raise ZeroDivisionError

        monkeypatch.setattr(json_format, "MessageToJson", broken)
        answer = orders.post("/v1/messages:describeChecks", json={})
        assert (answer.status_code, answer.json()["reason"]) == (500, "INTERNAL_FAULT")
        (correlation_id,) = re.findall("[0-9a-f]{12}", answer.json()["detail"])
        assert correlation_id in caplog.text


def _raw(
    center: RunningCenter,
    headers: Mapping[str, str],
    length: int,
    body: bytes = b"",
    path: str = "messages:publish",
) -> socket.socket:
    """Send a request whose body is incomplete."""
    http = center.server.parts.http
    assert http is not None
    connection = socket.create_connection(("127.0.0.1", http.port), 30)
    lines = [f"{name}: {text}" for name, text in headers.items()]
    head = [f"POST /v1/{path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    connection.sendall("\r\n".join([*head, f"Content-Length: {length}", *lines, "", ""]).encode() + body)
    return connection


def _silent(center: RunningCenter, count: int, stack: ExitStack) -> list[socket.socket]:
    """Open connections that send nothing."""
    http = center.server.parts.http
    assert http is not None
    opened = [socket.create_connection(("127.0.0.1", http.port), 30) for _ in range(count)]
    for each in opened:
        stack.callback(each.close)
        each.settimeout(0.01)
    return opened


def _closed(opened: list[socket.socket]) -> int:
    """How many of them the server has closed."""
    count = 0
    for each in opened:
        try:
            count += each.recv(1) == b""
        except TimeoutError:
            continue
        except OSError:
            count += 1
    return count


class TestEdge:
    def test_a_request_without_a_valid_key_is_refused_unread(self, center: RunningCenter) -> None:
        before = value(METRICS.login_failures, "invalid")
        wrong = {"Authorization": "Bearer wrong", "tmc-app": "orders", "Expect": "100-continue"}
        with closing(_raw(center, wrong, 10_000)) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 401 ")
        assert value(METRICS.login_failures, "invalid") == before + 1

    def test_nonsense_behind_a_refusal_is_not_in_the_log(
        self, center: RunningCenter, caplog: pytest.LogCaptureFixture
    ) -> None:
        http = center.server.parts.http
        assert http is not None
        with socket.create_connection(("127.0.0.1", http.port), 30) as connection:
            connection.sendall(
                b"POST /v1/messages:publish HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
            with suppress(ConnectionError):
                connection.sendall(b"zz\r\n")
                while connection.recv(4096):
                    pass
        assert "Fatal error" not in caplog.text

    def test_a_connection_that_shows_no_key_is_answered_late(self, center: RunningCenter) -> None:
        with httpx.Client(base_url=_url(center), timeout=httpx.Timeout(60, read=1)) as client:
            for _ in range(5):
                assert client.post("/v1/messages:publish", json={}).status_code == 401
            with pytest.raises(httpx.ReadTimeout):
                for _ in range(5):
                    client.post("/v1/messages:publish", json={})

    def test_the_newest_of_many_incomplete_requests_are_refused(self, center: RunningCenter) -> None:
        with ExitStack() as stack:
            opened = [_raw(center, dict(center.as_app("orders")), 100, b'{"') for _ in range(10)]
            for each in opened:
                stack.callback(each.close)
            for each in opened[-2:]:
                assert each.recv(100).startswith(b"HTTP/1.1 429 ")

    def test_budgets_are_those_of_grpc(self, tmp_path: Path) -> None:
        with (
            RunningCenter(f"sqlite:///{tmp_path}/c.db", limits={"calls_per_second": 1}, **HTTP) as limited,
            grpc.insecure_channel(limited.address) as channel,
        ):
            call = message_pb2_grpc.MessageServiceStub(channel).DescribeChecks
            with ThreadPoolExecutor(4) as pool:

                def ask(_: int) -> httpx.Response:
                    return httpx.post(
                        f"{_url(limited)}/v1/messages:describeChecks",
                        json={},
                        headers=dict(limited.as_app("orders")),
                    )

                call(message_pb2.DescribeChecksRequest(), metadata=limited.as_app("orders"))
                answers = list(pool.map(ask, range(4)))
            refused = [each for each in answers if each.status_code == 429]
            assert refused
            for each in refused:
                assert each.json()["reason"] == "RATE_LIMITED"
                assert int(each.headers["retry-after"]) * 1000 >= each.json()["retryAfterMs"] > 0

    def test_connections_beyond_the_limit_are_closed_and_those_before_are_served(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(doorkeeper, "_GRACE_S", 300.0)  # no connection is old enough to be closed for another
        with (
            RunningCenter(f"sqlite:///{tmp_path}/c.db", limits={"connections": 20}, **HTTP) as small,
            httpx.Client(base_url=_url(small), headers=dict(small.as_app("orders"))) as known,
            ExitStack() as stack,
        ):
            assert known.get("/healthz").is_success
            silent = _silent(small, 30, stack)
            eventually(lambda: _closed(silent) == 11)
            assert known.post("/v1/messages:describeChecks", json={}).is_success

    def test_silent_connections_leave_room_for_others(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_connections, "PATIENCE_S", 300.0)
        with (
            RunningCenter(f"sqlite:///{tmp_path}/c.db", limits={"connections": 20}, **HTTP) as small,
            ExitStack() as stack,
        ):
            silent = _silent(small, 19, stack)
            eventually(lambda: _closed(silent) >= 9)
            headers = dict(small.as_app("orders"))
            assert httpx.post(f"{_url(small)}/v1/messages:publish", json=_message("room"), headers=headers).is_success

    def test_generated_requests_end_in_documented_statuses(self, center: RunningCenter, orders: httpx.Client) -> None:
        chance = random.Random(7)
        operator = dict(center.operator)
        odd = ["", "0", -1, 1 << 40, True, None, [], {}, "x" * 300, "order.paid", "1-1-1-1", "é\u0000", 0.5]
        documented = {200, 400, 401, 403, 404, 409, 429, 503}
        for path, each in DOCUMENT["paths"].items():
            name = each["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            fields = list(DOCUMENT["components"]["schemas"][name]["properties"])
            if path.endswith((":drainServer", ":registerOperator")):
                continue  # they would end this center for the tests that follow
            for _ in range(5):
                given = {field: chance.choice(odd) for field in fields if chance.random() < 0.7}
                answer = orders.post(path, json=given, headers=operator if path.startswith("/v1/admin:") else {})
                assert answer.status_code in documented, (path, given, answer.text)


class TestOpenToAll:
    def test_it_is_addressed_as_this_machine_only(self, tmp_path: Path) -> None:
        """A web page whose own name leads here could use it otherwise: its browser would take it for the same origin."""
        with RunningCenter(f"sqlite:///{tmp_path}/c.db", open_to_all=True, **HTTP) as dev:
            url = f"{_url(dev)}/v1/messages:publish"
            for host, status in (
                ("evil.page", 421),
                ("evil.page:80", 421),
                ("", 421),
                ("localhost", 200),
                ("[::1]:1", 200),
            ):
                answer = httpx.post(url, json=_message(f"to {host}".strip()), headers={"host": host})
                assert answer.status_code == status, host
            assert httpx.post(url, json=_message("plain")).status_code == 200


class TestTls:
    def test_a_certificate_is_good_for_the_app_that_it_names(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        certificate, key = authority.issue("center", "IP:127.0.0.1")
        for name, other in (("orders", "orders.test"), ("host", "orders"), ("mail", "coupons")):
            authority.issue(name, f"DNS:{other}")
        with RunningCenter(f"sqlite:///{tmp_path}/c.db") as plain:
            registered = plain.keys, plain.token
        tls = {"certificate": str(certificate), "key": str(key), "client_authority": str(authority.certificate)}
        with RunningCenter(
            f"sqlite:///{tmp_path}/c.db", registered=registered, tls={**tls, "bind_apps": True}, **HTTP
        ) as bound:

            def ask(name: str) -> str:
                context = ssl.create_default_context(cafile=str(authority.certificate))
                if name:
                    context.load_cert_chain(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
                with httpx.Client(verify=context, timeout=60) as client:
                    try:
                        answer = client.post(
                            f"{_url(bound, 'https')}/v1/messages:describeChecks",
                            json={},
                            headers=dict(bound.as_app("orders")),
                        )
                    except httpx.TransportError:
                        return "no connection"
                return str(answer.json().get("reason", answer.status_code))

            assert [ask(name) for name in ("orders", "host", "mail", "")] == [
                "200",
                "200",
                "CERTIFICATE_OF_ANOTHER",
                "no connection",
            ]


def test_a_call_that_is_under_way_is_answered_when_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A locked database keeps the call open until the port is closed."""
    publish, begun = MessageServicer.Publish, 0

    async def counted(servicer: MessageServicer, caller: Caller, request: Any) -> Any:
        nonlocal begun
        begun += 1
        return await publish(servicer, caller, request)

    monkeypatch.setattr(MessageServicer, "Publish", counted)
    running = RunningCenter(f"sqlite:///{tmp_path}/c.db", **HTTP)
    url, headers = f"{_url(running)}/v1/messages:publish", dict(running.as_app("orders"))
    with ThreadPoolExecutor(1) as pool, closing(sqlite3.connect(tmp_path / "c.db", isolation_level=None)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        answer = pool.submit(httpx.post, url, json=_message("open"), headers=headers, timeout=60)
        eventually(lambda: begun == 1)
        stopping = threading.Thread(target=running.stop)
        stopping.start()
        eventually(lambda: not _listens(url))
        lock.execute("ROLLBACK")
        assert answer.result(60).json()["state"] == "MESSAGE_STATE_COMMITTED"
        stopping.join()


def _listens(url: str) -> bool:
    try:
        httpx.get(url, timeout=5)
    except httpx.ConnectError:
        return False
    except httpx.TransportError:
        return True
    return True


def test_without_its_library_the_server_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        each for each in sys.modules if each.startswith(("uvicorn", "tmc_server.http.server", "tmc_common.http_"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(CannotStart, match=r"tmc-center\[http\]"), RunningCenter(f"sqlite:///{tmp_path}/c.db", **HTTP):
        pytest.fail("it started")


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(CannotStart, match="Cannot listen"),
            RunningCenter(f"sqlite:///{tmp_path}/c.db", http={"listen": address}),
        ):
            pytest.fail("it started")
