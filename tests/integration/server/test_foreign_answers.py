"""Bodies that swell or never end, from HTTP servers of others, are refused and hardly read."""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.contract.adapters.test_sink import an_alert
from tmc_console import sso, sso_names
from tmc_server.alerts.webhook import WebhookSink
from tmc_server.app.broker_fitness import examine_broker
from tmc_server.domain.catalog import Catalog
from tmc_server.identity import oidc

ROOT = Path(__file__).parents[3]
_SPACES = b" " * (1 << 20)
_SWOLLEN = 100  # times that; 100 KB on the wire
_ENDLESS = 300  # times that: nobody should read so much


class Server(ThreadingHTTPServer):
    """Answers with valid JSON, followed by white space: by much of it, compressed, or by more than anybody should read."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.read_to_the_end = False
        super().__init__(("127.0.0.1", 0), _Answering)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def said_to(self, path: str) -> object:
        if "openid-configuration" in path:
            ends = {f"{name}_endpoint": f"{self.url}/{name}" for name in ("token", "authorization")}
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys", **ends}
        return [] if "/api/" in path else {"code": 0, "keys": [], "id_token": "a.b.c"}


class _Answering(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = json.dumps(self.server.said_to(self.path)).encode()
        self.send_response(200)
        if self.server.kind == "compressed":
            said = gzip.compress(said + _SPACES * _SWOLLEN)
            self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
        if self.server.kind == "endless":
            for _ in range(_ENDLESS):
                self.wfile.write(_SPACES)
            self.server.read_to_the_end = True

    do_GET = do_POST = _answer  # noqa: N815 - names of http.server


@pytest.fixture(params=["plain", "compressed", "endless"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(request.param)
    made.handle_error = lambda *_: None  # type: ignore[method-assign]  # the client hung up
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def _send_an_alert(url: str) -> None:
    WebhookSink(url, "feishu").send(an_alert(), Catalog())


def _fetch_keys(url: str) -> None:
    oidc.OidcTokens(oidc.Provider(issuer=url, audiences=["tmc"])).refresh()


def _log_in(url: str) -> None:
    provider = sso_names.Provider(issuer=url, client_id="tmc")
    asyncio.run(sso.SingleSignOn(provider).begin(f"{url}/back", "/"))


def _examine_the_broker(url: str) -> None:
    found = examine_broker("amqp://127.0.0.1:1", url)  # nobody listens there: this is about the management API
    faults = [each.must for each in found if not each.ok and "login" not in each.setting]
    if faults:
        raise ValueError(faults)


READERS: Sequence[Callable[[str], None]] = (_send_an_alert, _fetch_keys, _log_in, _examine_the_broker)


@pytest.mark.parametrize("read", READERS)
def test_answers_have_a_limit_in_bytes_after_decoding(server: Server, read: Callable[[str], None]) -> None:
    if server.kind == "plain":
        read(server.url)
        return
    with pytest.raises((OSError, ValueError, sso_names.LoginFailed)) as caught:
        read(server.url)
    reason = {"compressed": "Compressed", "endless": "TooLarge"}[server.kind]
    assert reason in f"{caught.value!r} {caught.value.__cause__!r}"
    assert not server.read_to_the_end


_BODY = "read_body"
BOUNDED = {
    "tmc_client/discovery.py": "the agent that the program configured, with the library's time limit",
    "tmc_common/consul.py": "the agent that the operator configured, with the library's time limit",
    "tmc_common/limited.py": "is the limit",
    "tmc_console/sso.py": _BODY,
    "tmc_server/alerts/smtp.py": "lines of 8,192 bytes",
    "tmc_server/alerts/webhook.py": _BODY,
    "tmc_server/app/broker_fitness.py": _BODY,
    "tmc_server/archives/folder.py": "TooLarge",
    "tmc_server/checks/http.py": _BODY,
    "tmc_server/delivery/webhook.py": _BODY,
    "tmc_storm/services/consul.py": "an agent that the storm has started",
    "tmc_storm/shop/over_http.py": "a center that the storm has started",
    "tmc_server/discovery/consul.py": "the agent that the operator configured, with the library's time limit",
    "tmc_server/identity/oidc.py": _BODY,
    "tmc_server/outgoing.py": "_MOST_BYTES",
}
"""Files that read what others send, other than over gRPC, and what limits it: a name in it, or a sentence.

gRPC limits messages after decoding: `grpc.max_receive_message_length` of each channel and server.
"""
_READERS = re.compile(
    r"^\s*(?:import|from) (?:httpx|fsspec|requests|smtplib|urllib\.request|http\.client)\b", re.MULTILINE
)


def _calls(path: Path) -> set[str]:
    """Names of the attributes that are called."""
    tree = ast.parse(path.read_text())
    return {
        node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }


def test_each_place_that_reads_from_others_has_a_limit() -> None:
    texts = {
        str(path.relative_to(ROOT)): path.read_text()
        for path in ROOT.glob("tmc_*/**/*.py")
        if "protocol" not in str(path)
    }
    found = {name for name, text in texts.items() if _READERS.search(text)}
    assert found == set(BOUNDED)
    for name in found:
        limit = BOUNDED[name]
        assert " " in limit or limit in texts[name], name
        if limit == _BODY:
            assert not _calls(ROOT / name) & {
                "json",
                "read",
                "aread",
                "iter_bytes",
                "aiter_bytes",
                "iter_text",
                "post",
            }, name
