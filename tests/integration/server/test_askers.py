"""The three kinds of checks against producers that answer well, badly, slowly, endlessly or not at all.

Whatever comes back, it is a verdict that was said exactly, or UNKNOWN with a typed reason: never a guess, never an exception.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpcore
import pytest
import uvloop

from tests.support.certificates import for_loopback
from tests.support.rogue import RogueGrpc, RogueHttp, TrapListener, proxy_without_anybody_behind
from tests.support.web import web_server
from tmc_server.checks.asking import without_poison
from tmc_server.checks.channels import Channels
from tmc_server.checks.grpc import GrpcChecks
from tmc_server.checks.http import HttpChecks
from tmc_server.checks.reflection import ReflectionChecks
from tmc_server.domain.checks import CheckAnswer, CheckReason, CheckTarget, Question, Verdict
from tmc_server.domain.ports.checks import Endpoint
from tmc_server.errors import CheckRefused
from tmc_server.outgoing import _Pinned
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

R = CheckReason
ENOUGH_MS = 10_000  # for a service that answers, even on a busy machine
SOON_MS = 700  # for one that never answers
ENDLESS = {"hang", "drip", "drip_head", "many_headers"}
COMMIT, ROLLBACK, UNKNOWN = Verdict.COMMIT, Verdict.ROLLBACK, Verdict.UNKNOWN


def a_question(key: str = "paid-7") -> Question:
    return Question(
        message_id="1-2-05-99",
        topic="order.paid",
        key=key,
        biz_id="orders-biz",
        attempt_id=b"a" * 16,
        ledger_id=b"l" * 16,
        created_ms=1_800_000_000_000,
    )


def later() -> float:
    """Time enough for a page."""
    return time.monotonic() + 30


def deadline_ms(mode: str) -> int:
    return SOON_MS if mode in ENDLESS else ENOUGH_MS


def at(port: int) -> Endpoint:
    return Endpoint(host="127.0.0.1", address="127.0.0.1", port=port)


@pytest.fixture(scope="module")
def trap() -> Iterator[TrapListener]:
    made = TrapListener()
    yield made
    assert made.connections == 0
    made.stop()


@pytest.fixture(scope="module")
def http_rogue(trap: TrapListener) -> Iterator[RogueHttp]:
    made = RogueHttp(trap.port)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def http() -> Iterator[HttpChecks]:
    made = HttpChecks()
    yield made
    made.close()


def by_http(http: HttpChecks, rogue: RogueHttp, mode: str, **options: Any) -> CheckAnswer:
    target = CheckTarget(name="", kind="http", options={"path": f"/{mode}", **options}, deadline_ms=deadline_ms(mode))
    [answer] = http.ask(target, at(rogue.port), "TOKEN", [a_question()], later())
    return answer


@contextmanager
def keeping_server(certificate: Path, key: Path) -> Iterator[tuple[int, set[Any]]]:
    """HTTPS that keeps connections and commits everything. Yields: port, clients that connected."""
    connections: set[Any] = set()

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            connections.add(self.client_address)
            self.send_response(200)
            self.send_header("Content-Length", "1")
            self.end_headers()
            self.wfile.write(b"2")

        def log_message(self, *_: Any) -> None:
            """Nothing on the screen of a test."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_port, connections
    server.shutdown()
    thread.join()
    server.server_close()


class TestHttp:
    @pytest.mark.parametrize(
        ("body", "verdict"),
        [
            (b"1", UNKNOWN),
            (b"2", COMMIT),
            (b"3", ROLLBACK),
            (b"4", UNKNOWN),
            (b"2\n", COMMIT),
            (b"3\r\n", ROLLBACK),
            (b'{"status": 2}', COMMIT),
            (b'{"status": "3"}', ROLLBACK),
            (b'{"status": "COMMIT"}', COMMIT),
            (b'{"status": "ROLLBACK", "messageKey": "paid-7", "bizID": "orders-biz"}', ROLLBACK),
            (b'{"status": "UNKNOWN", "detail": "still open"}', UNKNOWN),
            ('{"status": "COMMIT", "detail": "bezahlt, Größe"}'.encode(), COMMIT),
        ],
    )
    def test_exact_answers(self, http: HttpChecks, http_rogue: RogueHttp, body: bytes, verdict: Verdict) -> None:
        http_rogue.say("exact", body)
        answer = by_http(http, http_rogue, "exact")
        assert (answer.verdict, answer.reason) == (verdict, R.ANSWERED)

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"0",
            b"5",
            b"22",
            b"2 junk",
            b"2\n3",
            b"COMMIT",
            b"true",
            b"2.0",
            b"[2]",
            b'"2"',
            b"null",
            b"NaN",
            b'{"status": 2} x',
            b'{"status": 2, "status": 3}',
            b'{"status": true}',
            b'{"status": 2.0}',
            b"{}",
            b'{"status": "commit"}',
            b'{"status": ["COMMIT"]}',
            b'{"status": {"status": 2}}',
            b'{"Status": 2}',
            b'{"status": 2, "more": 1}',
            b'{"status": 1e0}',
            b'{"status": null}',
            "\uff12".encode(),
            b"\xff\xfe2\x00",
            b"\x002",
            b"<html>2</html>",
            b"[" * 60_000,
        ],
    )
    def test_anything_else_decides_nothing(self, http: HttpChecks, http_rogue: RogueHttp, body: bytes) -> None:
        http_rogue.say("other", body)
        answer = by_http(http, http_rogue, "other")
        assert (answer.verdict, answer.reason) == (UNKNOWN, R.NOT_UNDERSTOOD)

    @pytest.mark.parametrize(
        ("mode", "reason"),
        [
            ("hang", R.TIMED_OUT),
            ("drip", R.TIMED_OUT),
            ("drip_head", R.TIMED_OUT),
            ("huge", R.TOO_LARGE),
            ("huge_chunked", R.TOO_LARGE),
            ("bomb", R.NOT_UNDERSTOOD),
            ("redirect", R.FAILED),
            ("redirect_permanent", R.FAILED),
            ("error", R.FAILED),
            ("created", R.FAILED),
            ("gone", R.FAILED),
            ("noise", R.FAILED),
            ("cut", R.FAILED),
            ("reset", R.FAILED),
        ],
    )
    def test_bad_habits(self, http: HttpChecks, http_rogue: RogueHttp, mode: str, reason: CheckReason) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answer = by_http(http, http_rogue, mode)
        assert (answer.verdict, answer.reason) == (UNKNOWN, reason), answer.detail
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB

    def test_endless_headers_end(self, http: HttpChecks, http_rogue: RogueHttp) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answer = by_http(http, http_rogue, "many_headers")
        assert answer.verdict is UNKNOWN
        assert answer.reason in (R.TIMED_OUT, R.FAILED)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000

    def test_interim_answers_without_end_end_at_a_number_of_bytes(
        self, http: HttpChecks, http_rogue: RogueHttp
    ) -> None:
        target = CheckTarget(name="", kind="http", options={"path": "/hints"}, deadline_ms=60_000)
        [answer] = http.ask(target, at(http_rogue.port), "TOKEN", [a_question()], time.monotonic() + 120)
        assert (answer.verdict, answer.reason) == (UNKNOWN, R.FAILED)
        assert "more than 8388608 bytes" in answer.detail

    def test_the_checked_address_is_connected_to_and_the_name_is_only_said(
        self, http: HttpChecks, http_rogue: RogueHttp
    ) -> None:
        http_rogue.say("look", b"2")
        target = CheckTarget(name="", kind="http", options={"path": "/look"}, deadline_ms=ENOUGH_MS)
        endpoint = Endpoint(host="no-such-name.invalid", address="127.0.0.1", port=http_rogue.port)
        [answer] = http.ask(target, endpoint, "TOKEN", [a_question()], later())
        assert answer.verdict is COMMIT
        assert f"Host: no-such-name.invalid:{http_rogue.port}".encode() in http_rogue.heads[-1]

    def test_a_kept_connection_that_was_closed_costs_no_answer(self, http: HttpChecks, http_rogue: RogueHttp) -> None:
        target = CheckTarget(name="", kind="http", options={"path": "/hangs_up"}, deadline_ms=5_000, concurrency=1)
        answers = http.ask(target, at(http_rogue.port), "T", [a_question(str(n)) for n in range(50)], later())
        assert Counter(answer.reason for answer in answers) == {R.ANSWERED: 50}

    @pytest.mark.parametrize("later_on", [False, True])
    def test_what_a_service_says_unasked_is_no_answer_to_the_next_question(
        self, http: HttpChecks, http_rogue: RogueHttp, later_on: bool
    ) -> None:
        """It says COMMIT twice to the first question, at once or a little later, and would say ROLLBACK to the next."""

        answered, said = threading.Event(), threading.Event()
        commit, rollback = (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n" + verdict for verdict in (b"2", b"3"))

        def answer(connection: socket.socket, _body: bytes) -> None:
            if "messageKey=first" in http_rogue.asked[-1]:
                if later_on:
                    connection.sendall(commit)
                    answered.wait(20)
                    connection.sendall(commit)
                else:
                    connection.sendall(2 * commit)
                said.set()
                http_rogue._read(connection)
            connection.sendall(rollback)

        http_rogue.answers["twice"] = answer
        target = CheckTarget(name="", kind="http", options={"path": "/twice"}, deadline_ms=ENOUGH_MS, concurrency=1)
        [first] = http.ask(target, at(http_rogue.port), "T", [a_question("first")], later())
        answered.set()
        assert said.wait(20)
        [second] = http.ask(target, at(http_rogue.port), "T", [a_question("second")], later())
        assert (first.verdict, second.verdict) == (COMMIT, ROLLBACK)

    def test_connections_are_kept_for_the_same_name_and_never_used_for_another(self, tmp_path: Path) -> None:
        certificate, key = for_loopback(tmp_path, "ca.pem")
        with keeping_server(certificate, key) as (port, connections):
            http = HttpChecks(ssl.create_default_context(cafile=str(certificate)))
            target = CheckTarget(
                name="", kind="http", options={"path": "/v"}, deadline_ms=10_000, concurrency=1, tls=True
            )
            right, wrong = (
                Endpoint(host="localhost", address="127.0.0.1", port=port),
                Endpoint(host="shop.invalid", address="127.0.0.1", port=port),
            )
            for _ in range(3):
                answers = http.ask(target, right, "T", [a_question("1"), a_question("2")], later())
                assert {answer.verdict for answer in answers} == {COMMIT}
            assert len(connections) == 1
            [answer] = http.ask(target, wrong, "T", [a_question()], later())
            assert (answer.verdict, answer.reason) == (UNKNOWN, R.UNREACHABLE)
            assert "shop.invalid" in answer.detail
            http.close()

    def test_what_is_said_before_tls_is_no_answer(self, tmp_path: Path) -> None:
        """Anybody on the way could have said it; the certificate proves what comes after it."""
        certificate, key = for_loopback(tmp_path, "ca.pem")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)

        def speak_first(listener: socket.socket) -> None:
            connection, _ = listener.accept()
            connection.settimeout(20)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n2")
            with suppress(OSError), context.wrap_socket(connection, server_side=True) as secured:
                secured.recv(1)

        async def connect(port: int) -> None:
            stream = await _Pinned(at(port)).connect_tcp("localhost", port)
            await asyncio.to_thread(eventually, lambda: stream.get_extra_info("is_readable"))
            await stream.start_tls(ssl.create_default_context(cafile=str(certificate)), "localhost")

        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=speak_first, args=(listener,), daemon=True)
            thread.start()
            with pytest.raises(httpcore.ConnectError, match="before it was asked"):
                uvloop.run(connect(listener.getsockname()[1]))
            thread.join()

    def test_a_connection_that_was_reset_before_a_write_fails_as_the_network_does(self) -> None:
        """So that the question goes out over a new one; uvloop has an error of its own for it."""

        async def write(listener: socket.socket) -> None:
            stream = await _Pinned(at(listener.getsockname()[1])).connect_tcp("localhost", 1)
            connection, _ = listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            await asyncio.to_thread(eventually, lambda: stream.get_extra_info("is_readable"))
            for _ in range(3):
                await stream.write(b"GET")

        with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(httpcore.WriteError):
            uvloop.run(write(listener))

    def test_a_connection_is_closed_when_its_tls_handshake_takes_too_long(self, http: HttpChecks) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            target = CheckTarget(name="", kind="http", options={"path": "/v"}, deadline_ms=SOON_MS, tls=True)
            [answer] = http.ask(target, at(silent.getsockname()[1]), "T", [a_question()], later())
            assert answer.reason is R.TIMED_OUT
            connection, _ = silent.accept()
            with connection:
                connection.settimeout(20)
                with suppress(ConnectionResetError):
                    while connection.recv(65_536):  # the greeting, then the end
                        pass

    def test_nobody_there(self, http: HttpChecks) -> None:
        target = CheckTarget(name="", kind="http", options={"path": "/v"}, deadline_ms=ENOUGH_MS)
        [answer] = http.ask(target, at(free_port()), "TOKEN", [a_question()], later())
        assert answer.reason is R.UNREACHABLE

    def test_half_a_surrogate_pair_is_replaced(self, http: HttpChecks, http_rogue: RogueHttp) -> None:
        """No database takes it, and JSON can say it."""
        http_rogue.say("half", b'{"status": "UNKNOWN", "detail": "not \\ud800 yet"}')
        assert by_http(http, http_rogue, "half").detail == "not ? yet"

    def test_another_messages_answer(self, http: HttpChecks, http_rogue: RogueHttp) -> None:
        for echo in (b'"messageKey": "paid-8"', b'"bizID": "x"', b'"messageId": "1-1-05-1"'):
            http_rogue.say("mixed", b'{"status": 2, ' + echo + b"}")
            assert by_http(http, http_rogue, "mixed").reason is R.OTHER_MESSAGE

    def test_what_is_asked(self, http: HttpChecks, http_rogue: RogueHttp) -> None:
        http_rogue.say("look", b"2")
        by_http(http, http_rogue, "look")
        assert http_rogue.asked[-1] == "GET /look?bizID=orders-biz&messageKey=paid-7 HTTP/1.1"
        head = http_rogue.heads[-1].decode().lower()
        assert "tmc-check-token: token" in head
        assert "accept-encoding: identity" in head
        assert f"host: {http_rogue.address}" in head

    def test_a_key_is_never_part_of_the_path(self, http: HttpChecks, http_rogue: RogueHttp) -> None:
        http_rogue.say("look", b"2")
        target = CheckTarget(name="", kind="http", options={"path": "/look"}, deadline_ms=ENOUGH_MS)
        http.ask(target, at(http_rogue.port), "T", [a_question("a&bizID=other#/../x y")], later())
        line = http_rogue.asked[-1]
        assert line == "GET /look?bizID=orders-biz&messageKey=a%26bizID%3Dother%23%2F..%2Fx+y HTTP/1.1"

    def test_a_service_that_fails_a_whole_round_is_not_asked_on(self, http: HttpChecks, http_rogue: RogueHttp) -> None:
        target = CheckTarget(name="", kind="http", options={"path": "/hang"}, deadline_ms=SOON_MS, concurrency=4)
        before = len(http_rogue.asked)
        answers = http.ask(target, at(http_rogue.port), "T", [a_question(str(n)) for n in range(100)], later())
        assert {answer.reason for answer in answers} == {R.TIMED_OUT, R.NOT_ASKED}
        assert 4 <= len(http_rogue.asked) - before <= 8

    def test_questions_that_go_wrong_do_not_stop_the_others(self, http: HttpChecks, http_rogue: RogueHttp) -> None:
        """A whole round of them in front: each is about one key, not about the service."""

        def answer(connection, _body):
            key = http_rogue.asked[-1].rpartition("messageKey=")[2].split(" ")[0]
            connection.sendall(
                b"HTTP/1.1 404 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                if int(key) < 20
                else b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\n2"
            )

        http_rogue.answers["some"] = answer
        target = CheckTarget(name="", kind="http", options={"path": "/some"}, deadline_ms=ENOUGH_MS, concurrency=1)
        answers = http.ask(target, at(http_rogue.port), "T", [a_question(str(n)) for n in range(60)], later())
        assert Counter(answer.reason for answer in answers) == {R.FAILED: 20, R.ANSWERED: 40}

    def test_what_there_is_no_time_for_is_not_asked_and_not_counted(
        self, http: HttpChecks, http_rogue: RogueHttp
    ) -> None:
        target = CheckTarget(name="", kind="http", options={"path": "/hang"}, deadline_ms=SOON_MS, concurrency=4)
        answers = http.ask(target, at(http_rogue.port), "T", [a_question(str(n)) for n in range(9)], time.monotonic())
        assert {answer.reason for answer in answers} == {R.NOT_ASKED}
        assert not any(answer.reason.counts for answer in answers)

    def test_a_batch(self, http: HttpChecks, http_rogue: RogueHttp) -> None:
        http_rogue.say(
            "batch",
            b'{"results": [{"messageId": "1-2-05-99", "status": "COMMIT"}, {"messageId": "x", "status": "COMMIT"},'
            b' {"status": "COMMIT"}]}',
        )
        target = CheckTarget(name="", kind="http", options={"path": "/batch", "batch": "true"}, deadline_ms=ENOUGH_MS)
        answers = http.ask(target, at(http_rogue.port), "T", [a_question(), a_question(), a_question()], later())
        assert [answer.reason for answer in answers] == [R.ANSWERED, R.OTHER_MESSAGE, R.NOT_UNDERSTOOD]
        assert answers[0].verdict is COMMIT
        assert b'"messageKey": "paid-7"' in http_rogue.bodies[-1]
        [alone] = http.ask(target, at(http_rogue.port), "T", [a_question()], later())
        assert alone.reason is R.NOT_UNDERSTOOD  # three answers to one question

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({}, "path"),
            ({"path": "verify"}, "path"),
            ({"path": "/a b"}, "path"),
            ({"path": "/a\r\nX: y"}, "path"),
            ({"path": "/é"}, "path"),
            ({"path": "/a", "batch": "yes"}, "batch"),
            ({"path": "/a", "url": "x"}, "url"),
        ],
    )
    def test_options_that_cannot_work(self, http: HttpChecks, options: dict[str, str], why: str) -> None:
        with pytest.raises(CheckRefused, match=why):
            http.accept(CheckTarget(name="", kind="http", options=options))

    def test_tried_out(self, http: HttpChecks, http_rogue: RogueHttp) -> None:
        http_rogue.say("fine", b"4")
        http.examine(CheckTarget(name="", kind="http", options={"path": "/fine"}), at(http_rogue.port), "T")
        with pytest.raises(CheckRefused, match="/gone"):
            http.examine(CheckTarget(name="", kind="http", options={"path": "/gone"}), at(http_rogue.port), "T")
        with pytest.raises(CheckRefused, match="start the service"):
            http.examine(CheckTarget(name="", kind="http", options={"path": "/gone"}), at(free_port()), "T")


@pytest.fixture
def grpc_rogue() -> Iterator[RogueGrpc]:
    made = RogueGrpc()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def channels() -> Iterator[Channels]:
    made = Channels()
    yield made
    made.close()


class TestWrongProtocol:
    """A server of another protocol listens at the address: the operator learns which protocol it does not speak."""

    KINDS = (
        ("grpc", "web", False, "HTTP/1, not gRPC"),
        ("reflection", "web", False, "HTTP/1, not gRPC"),
        ("grpc", "web", True, "no TLS"),
        ("http", "web", True, "no TLS"),
        ("http", "grpc", False, "no HTTP/1"),
    )

    @pytest.mark.parametrize(("kind", "place", "tls", "spoken"), KINDS)
    def test_what_it_speaks_is_said(
        self,
        channels: Channels,
        http: HttpChecks,
        grpc_rogue: RogueGrpc,
        kind: str,
        place: str,
        tls: bool,
        spoken: str,
    ) -> None:
        askers: dict[str, Any] = {
            "grpc": GrpcChecks(channels),
            "reflection": ReflectionChecks(channels),
            "http": http,
        }
        options = {"http": {"path": "/v"}, "reflection": shop_target().options}.get(kind, {})
        target = CheckTarget(name="", kind=kind, options=options, tls=tls, deadline_ms=ENOUGH_MS)
        with web_server() as port:
            endpoint = at(port if place == "web" else grpc_rogue.port)
            [answer] = askers[kind].ask(target, endpoint, "T", [a_question()], later())
            with pytest.raises(CheckRefused, match=spoken):
                askers[kind].examine(target, endpoint, "T")
        assert (answer.verdict, answer.reason) == (UNKNOWN, R.WRONG_PROTOCOL), answer
        assert spoken in answer.detail


class TestGrpc:
    @pytest.fixture
    def checks(self, channels: Channels) -> GrpcChecks:
        return GrpcChecks(channels)

    def ask(self, checks: GrpcChecks, rogue: RogueGrpc, *keys: str) -> list[CheckAnswer]:
        target = CheckTarget(name="", kind="grpc", deadline_ms=deadline_ms(rogue.mode))
        return checks.ask(target, at(rogue.port), "TOKEN", [a_question(key) for key in keys or ("k",)], later())

    @pytest.mark.parametrize(
        ("mode", "verdict", "reason"),
        [
            ("commit", COMMIT, R.ANSWERED),
            ("rollback", ROLLBACK, R.ANSWERED),
            ("unknown", UNKNOWN, R.ANSWERED),
            ("unspecified", UNKNOWN, R.ANSWERED),
            ("seven", UNKNOWN, R.NOT_UNDERSTOOD),
            ("other", UNKNOWN, R.OTHER_MESSAGE),
            ("hang", UNKNOWN, R.TIMED_OUT),
            ("denied", UNKNOWN, R.DENIED),
            ("internal", UNKNOWN, R.FAILED),
            ("unavailable", UNKNOWN, R.UNREACHABLE),
            ("exhausted", UNKNOWN, R.FAILED),
            ("junk", UNKNOWN, R.NOT_UNDERSTOOD),
            ("one less", UNKNOWN, R.NOT_UNDERSTOOD),
            ("nameless", UNKNOWN, R.NOT_UNDERSTOOD),
            ("large", UNKNOWN, R.TOO_LARGE),
            ("no service", UNKNOWN, R.NO_METHOD),
        ],
    )
    def test_answers(
        self, checks: GrpcChecks, grpc_rogue: RogueGrpc, mode: str, verdict: Verdict, reason: CheckReason
    ) -> None:
        grpc_rogue.mode = mode
        [answer] = self.ask(checks, grpc_rogue)
        assert (answer.verdict, answer.reason) == (verdict, reason), answer.detail
        assert set(grpc_rogue.tokens) == {"TOKEN"}

    def test_one_call_for_many(self, checks: GrpcChecks, grpc_rogue: RogueGrpc) -> None:
        assert len(self.ask(checks, grpc_rogue, *map(str, range(200)))) == 200
        assert grpc_rogue.calls == ["/tmc.v1.CheckService/CheckMany"]

    def test_services_with_check_alone_are_remembered(self, checks: GrpcChecks, grpc_rogue: RogueGrpc) -> None:
        grpc_rogue.mode = "single"
        for _ in range(2):
            answers = self.ask(checks, grpc_rogue, *map(str, range(50)))
            assert {answer.verdict for answer in answers} == {COMMIT}
        assert grpc_rogue.calls.count("/tmc.v1.CheckService/CheckMany") == 1
        assert grpc_rogue.calls.count("/tmc.v1.CheckService/Check") == 100

    def test_tried_out(self, checks: GrpcChecks, grpc_rogue: RogueGrpc) -> None:
        target = CheckTarget(name="", kind="grpc", deadline_ms=ENOUGH_MS)
        checks.examine(target, at(grpc_rogue.port), "T")
        grpc_rogue.mode = "single"
        checks.examine(target, at(grpc_rogue.port), "T")
        grpc_rogue.mode = "no service"
        with pytest.raises(CheckRefused, match=r"no tmc\.v1\.CheckService"):
            checks.examine(target, at(grpc_rogue.port), "T")
        with pytest.raises(CheckRefused, match="start the service"):
            checks.examine(target, at(free_port()), "T")
        with pytest.raises(CheckRefused, match="no options"):
            checks.accept(CheckTarget(name="", kind="grpc", options={"path": "/"}))

    def test_a_poisoned_message_is_found_and_its_neighbors_answered(
        self, checks: GrpcChecks, grpc_rogue: RogueGrpc
    ) -> None:
        grpc_rogue.mode = "poison"
        target = CheckTarget(name="", kind="grpc", deadline_ms=5_000)
        questions = [a_question("poison" if number == 300 else str(number)) for number in range(500)]
        answers = without_poison(
            lambda some: checks.ask(target, at(grpc_rogue.port), "T", some, later()), questions, later()
        )
        assert [answer.verdict for answer in answers].count(COMMIT) == 499
        assert answers[300].reason is R.FAILED
        assert len(grpc_rogue.calls) <= 24

    def test_a_service_that_always_fails_is_not_asked_for_each(self, checks: GrpcChecks, grpc_rogue: RogueGrpc) -> None:
        grpc_rogue.mode = "internal"
        target = CheckTarget(name="", kind="grpc", deadline_ms=5_000)
        questions = [a_question(str(number)) for number in range(500)]
        answers = without_poison(
            lambda some: checks.ask(target, at(grpc_rogue.port), "T", some, later()), questions, later()
        )
        assert {answer.reason for answer in answers} == {R.FAILED}
        assert len(answers) == 500
        assert len(grpc_rogue.calls) <= 24


OPTIONS = {
    "method": "shop.v1.OrderService/GetOrder",
    "request": '{"order_id": "{key}"}',
    "verdict": "payment.status",
    "COMMIT": "STATUS_PAID",
    "ROLLBACK": "STATUS_CANCELLED",
}


def shop_target(mode: str = "", **changes: str) -> CheckTarget:
    return CheckTarget(name="", kind="reflection", options={**OPTIONS, **changes}, deadline_ms=deadline_ms(mode))


class TestReflection:
    @pytest.fixture
    def checks(self, channels: Channels) -> ReflectionChecks:
        return ReflectionChecks(channels)

    def ask(self, checks: ReflectionChecks, rogue: RogueGrpc, target: CheckTarget, *keys: str) -> list[CheckAnswer]:
        return checks.ask(target, at(rogue.port), "TOKEN", [a_question(key) for key in keys or ("paid-7",)], later())

    @pytest.mark.parametrize("version", ["v1", "v1alpha"])
    @pytest.mark.parametrize(
        ("status", "verdict", "reason"),
        [
            (1, COMMIT, R.ANSWERED),
            (2, ROLLBACK, R.ANSWERED),
            (3, UNKNOWN, R.NOT_UNDERSTOOD),
            (0, UNKNOWN, R.FIELD_ABSENT),
            (17, UNKNOWN, R.NOT_UNDERSTOOD),
        ],
    )
    def test_a_method_without_stubs(
        self,
        checks: ReflectionChecks,
        grpc_rogue: RogueGrpc,
        version: str,
        status: int,
        verdict: Verdict,
        reason: CheckReason,
    ) -> None:
        grpc_rogue.describe, grpc_rogue.order = version, {"payment": status}
        [answer] = self.ask(checks, grpc_rogue, shop_target())
        assert (answer.verdict, answer.reason) == (verdict, reason)

    def test_values_by_number_name_bool_and_well_known_types(
        self, checks: ReflectionChecks, grpc_rogue: RogueGrpc
    ) -> None:
        cases = [
            (shop_target(COMMIT="1"), {"payment": 1}, COMMIT),
            (shop_target(UNKNOWN="STATUS_OPEN"), {"payment": 3}, UNKNOWN),
            (shop_target(UNKNOWN="STATUS_NONE"), {"payment": 0}, UNKNOWN),
            (shop_target(verdict="code", COMMIT="200, 201", ROLLBACK="410"), {"code": 201}, COMMIT),
            (shop_target(verdict="done", COMMIT="true", ROLLBACK="never"), {"done": True}, COMMIT),
            (shop_target(verdict="exact", COMMIT="1", ROLLBACK="0"), {"exact": 0}, ROLLBACK),
            (shop_target(verdict="paid_at.seconds", COMMIT="12", ROLLBACK="13"), {"paid_at": 12}, COMMIT),
        ]
        for target, order, verdict in cases:
            grpc_rogue.order = order
            [answer] = self.ask(checks, grpc_rogue, target)
            assert (answer.verdict, answer.reason) == (verdict, R.ANSWERED), (order, answer)

    @pytest.mark.parametrize("order", [{}, {"code": 0}, {"done": False}])
    def test_an_empty_answer_decides_nothing(
        self, checks: ReflectionChecks, grpc_rogue: RogueGrpc, order: dict[str, Any]
    ) -> None:
        grpc_rogue.order = order
        for path in ("payment.status", "code", "done", "exact", "paid_at.seconds"):
            target = shop_target(verdict=path, COMMIT="0,false,STATUS_NONE", ROLLBACK="1")
            [answer] = self.ask(checks, grpc_rogue, target)
            assert answer.verdict is UNKNOWN, path

    def test_braces_in_a_key_are_no_placeholders(self, checks: ReflectionChecks) -> None:
        asked = checks.render(shop_target(), a_question("k{attempt_id}{key}"))
        assert asked == 'shop.v1.OrderService/GetOrder {"order_id": "k{attempt_id}{key}"}'

    def test_an_echo_must_be_right(self, checks: ReflectionChecks, grpc_rogue: RogueGrpc) -> None:
        target = shop_target(echo="order_id")
        for echo, reason in (("paid-7", R.ANSWERED), ("paid-8", R.OTHER_MESSAGE), ("", R.OTHER_MESSAGE)):
            grpc_rogue.order = {"payment": 1, "order_id": echo}
            [answer] = self.ask(checks, grpc_rogue, target)
            assert answer.reason is reason

    @pytest.mark.parametrize(
        ("mode", "reason"),
        [
            ("hang", R.TIMED_OUT),
            ("unimplemented", R.NO_METHOD),
            ("junk", R.NOT_UNDERSTOOD),
            ("large", R.TOO_LARGE),
        ],
    )
    def test_bad_habits_of_the_method(
        self, checks: ReflectionChecks, grpc_rogue: RogueGrpc, mode: str, reason: CheckReason
    ) -> None:
        grpc_rogue.mode = mode
        [answer] = self.ask(checks, grpc_rogue, shop_target(mode))
        assert (answer.verdict, answer.reason) == (UNKNOWN, reason), answer.detail

    @pytest.mark.parametrize(
        ("describe", "reason"),
        [
            ("absent", R.NO_REFLECTION),
            ("hang", R.TIMED_OUT),
            ("breaks", R.NO_REFLECTION),
            ("junk", R.BAD_DESCRIPTION),
            ("many files", R.BAD_DESCRIPTION),
            ("large", R.BAD_DESCRIPTION),
            ("deep", R.BAD_DESCRIPTION),
            ("circle", R.BAD_DESCRIPTION),
            ("chain", R.BAD_DESCRIPTION),
            ("missing import", R.NO_METHOD),
        ],
    )
    def test_bad_habits_of_the_description(
        self, checks: ReflectionChecks, grpc_rogue: RogueGrpc, describe: str, reason: CheckReason
    ) -> None:
        grpc_rogue.describe = describe
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        [answer] = self.ask(checks, grpc_rogue, shop_target(describe))
        assert (answer.verdict, answer.reason) == (UNKNOWN, reason), answer.detail
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000

    def test_a_bad_description_is_fetched_once_a_minute_and_again_when_the_target_is_set(
        self, checks: ReflectionChecks, grpc_rogue: RogueGrpc
    ) -> None:
        grpc_rogue.describe = "large"
        for _ in range(3):
            [answer] = self.ask(checks, grpc_rogue, shop_target())
            assert answer.reason is R.BAD_DESCRIPTION
        assert grpc_rogue.described == 1
        grpc_rogue.describe = "v1"
        checks.examine(shop_target(), at(grpc_rogue.port), "TOKEN")
        grpc_rogue.order = {"payment": 1}
        [answer] = self.ask(checks, grpc_rogue, shop_target())
        assert answer.verdict is COMMIT

    def test_a_redeployed_service_is_described_again(self, checks: ReflectionChecks, grpc_rogue: RogueGrpc) -> None:
        grpc_rogue.order = {"payment": 1}
        for _ in range(3):
            self.ask(checks, grpc_rogue, shop_target())
        assert grpc_rogue.described == 1
        grpc_rogue.mode = "unimplemented"
        self.ask(checks, grpc_rogue, shop_target())
        grpc_rogue.mode = "commit"
        [answer] = self.ask(checks, grpc_rogue, shop_target())
        assert answer.verdict is COMMIT
        assert grpc_rogue.described == 2

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"method": "shop.v1.OrderService/Watch"}, "streams"),
            ({"method": "shop.v1.OrderService/Nothing"}, "no method"),
            ({"method": "shop.v1.Nobody/GetOrder"}, "no such symbol"),
            ({"verdict": "payment.state"}, "no single field"),
            ({"verdict": "payment"}, "is a message"),
            ({"verdict": "notes"}, "no single field"),
            ({"request": '{"number": "{key}"}'}, "does not fit"),
            ({"COMMIT": "STATUS_NONE"}, "empty answer"),
            ({"COMMIT": "PAID"}, "has no PAID"),
            ({"verdict": "done", "COMMIT": "true", "ROLLBACK": "false"}, "empty answer"),
            ({"echo": "nothing"}, "echo"),
        ],
    )
    def test_targets_that_cannot_work(
        self, checks: ReflectionChecks, grpc_rogue: RogueGrpc, changes: dict[str, str], why: str
    ) -> None:
        target = shop_target(**changes)
        checks.accept(target)
        with pytest.raises(CheckRefused, match=why):
            checks.examine(target, at(grpc_rogue.port), "T")

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"method": "GetOrder"}, "Service/Method"),
            ({"request": "{"}, "no JSON"),
            ({"request": "[" * 3000}, "no JSON"),
            ({"request": "[]"}, "JSON object"),
            ({"request": '{"order_id": "{kye}"}'}, "knows no {kye}"),
            ({"request": '{"order_id": "x"}'}, "needs {key}"),
            ({"COMMIT": ""}, "COMMIT and ROLLBACK"),
            ({"ROLLBACK": "STATUS_PAID"}, "one verdict only"),
            ({"commit": "x"}, "no option commit"),
            ({"verdict": ""}, "needs the option verdict"),
        ],
    )
    def test_options_that_cannot_work(self, checks: ReflectionChecks, changes: dict[str, str], why: str) -> None:
        with pytest.raises(CheckRefused, match=why):
            checks.accept(shop_target(**changes))

    def test_it_looks_the_same_from_many_threads(self, checks: ReflectionChecks, grpc_rogue: RogueGrpc) -> None:
        grpc_rogue.order = {"payment": 1}
        found: list[CheckAnswer] = []

        def ask() -> None:
            found.extend(self.ask(checks, grpc_rogue, shop_target(), *map(str, range(20))))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answer.verdict for answer in found] == [COMMIT] * 160


def test_a_proxy_without_anybody_behind_it_is_away_from_the_second_question_on(
    http: HttpChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether the handler of the first one has begun."""
    monkeypatch.setattr("tmc_server.outgoing._HANG_UP_S", 5.0)  # on a busy machine it takes its time
    target = CheckTarget(name="", kind="http", options={"path": "/verify"}, deadline_ms=ENOUGH_MS)
    with proxy_without_anybody_behind() as (port, _):
        answers = [http.ask(target, at(port), "", [a_question()], later())[0] for _ in range(3)]
    assert [answer.reason for answer in answers] == [R.FAILED, R.UNREACHABLE, R.UNREACHABLE]


def test_a_service_that_a_question_killed_has_failed_at_all_of_them() -> None:
    """Its halves find nobody. Uncounted, the same batch would kill it again and again."""
    away = CheckAnswer.unknown(R.UNREACHABLE)
    failed = CheckAnswer.unknown(R.FAILED)
    questions = [a_question(str(number)) for number in range(8)]
    answers = without_poison(lambda some: [failed if len(some) == 8 else away] * len(some), questions, later())
    assert answers == [failed] * 8
