"""Reflection as grpcurl uses it, and the grpcurl lines of the docs, replayed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.center import RunningCenter
from tests.support.certificates import for_loopback
from tests.support.grpcurl import VERSIONS, Line, Reflection
from tmc_client.protocol import admin_pb2, admin_pb2_grpc
from tmc_server.app import initialise
from tmc_server.config import Config

DOCS = Path(__file__).parents[2] / "docs"


def lines() -> list[str]:
    """Every grpcurl line of the docs."""
    found = []
    for page in sorted([*DOCS.rglob("*.md"), DOCS.parent / "README.md"]):
        found += re.findall(r"^\$ (grpcurl .+)$", page.read_text(), re.M)
    return found


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    with RunningCenter(f"sqlite:///{tmp_path_factory.mktemp('reflection')}/c.db") as running:
        yield running


@pytest.mark.parametrize("versions", [VERSIONS, VERSIONS[1:]])
def test_list_describe_and_invoke(center: RunningCenter, versions: tuple[str, ...]) -> None:
    with grpc.insecure_channel(center.address) as channel:
        reflection = Reflection(channel, versions)
        services = reflection.services()
        assert {"tmc.v1.MessageService", "tmc.v1.ConsumptionService", "tmc.v1.AdminService", "grpc.health.v1.Health",
                *VERSIONS} <= set(services)  # fmt: skip
        assert reflection.used == versions[0]
        service = reflection.describe("tmc.v1.MessageService")
        assert [method.name for method in service.methods][:2] == ["Prepare", "PrepareMany"]
        fields = reflection.describe("tmc.v1.PrepareRequest").fields_by_name
        assert "attempt_id" in fields
        answer = reflection.invoke("tmc.v1.AdminService/ListTopics", {}, center.operator)
        assert [topic["name"] for topic in answer["topics"]] == ["order.paid"]
        with pytest.raises(KeyError):
            reflection.describe("tmc.v1.Nothing")


def test_a_server_without_v1_is_asked_in_the_older_words(center: RunningCenter) -> None:
    with grpc.insecure_channel(center.address) as channel:
        reflection = Reflection(channel, ("grpc.reflection.v9.ServerReflection", VERSIONS[1]))
        assert "tmc.v1.AdminService" in reflection.services()
        assert reflection.used == VERSIONS[1]


def test_there_are_lines_to_replay() -> None:
    assert len(lines()) >= 5


@pytest.mark.parametrize("text", lines())
def test_a_line_of_the_docs_works(
    center: RunningCenter, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS when it says so, against a center that has what the pages talk about."""
    monkeypatch.chdir(tmp_path)
    secured = "-cacert" in text
    certificate, key = map(str, for_loopback(tmp_path, "ca.pem")) if secured else ("", "")
    if secured:
        _serve_with_tls(text, certificate, key, tmp_path)
        return
    _replay(text, center.address, center.token, center.keys["orders"])


def _serve_with_tls(text: str, certificate: str, key: str, folder: Path) -> None:
    import asyncio
    import threading

    from tmc_server.app import Center

    config = Config.model_validate(
        {
            "server": {"listen": "127.0.0.1:0"},
            "store": {"catalog": f"sqlite:///{folder}/c.db", "change_delay_ms": 1500},
            "tls": {"certificate": certificate, "key": key},
        }
    )
    token = initialise(config) or ""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def make() -> Center:
        made = Center(config)
        await made.start()
        return made

    center = asyncio.run_coroutine_threadsafe(make(), loop).result(30)
    try:
        address = f"localhost:{center.port}"
        credentials = grpc.ssl_channel_credentials(Path(certificate).read_bytes())
        with grpc.secure_channel(address, credentials) as channel:
            admin, metadata = admin_pb2_grpc.AdminServiceStub(channel), [("authorization", f"Bearer {token}")]
            orders = admin.RegisterApp(admin_pb2.RegisterAppRequest(id="orders"), metadata=metadata).key
            admin.RegisterTopic(admin_pb2.RegisterTopicRequest(name="order.paid", owner="orders"), metadata=metadata)
        _replay(text, address, token, orders)
    finally:
        asyncio.run_coroutine_threadsafe(center.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def _replay(text: str, address: str, token: str, key: str) -> None:
    variables = {"TMC_ADDRESS": address, "TMC_ADMIN_TOKEN": token, "TMC_KEY": key}
    line = Line.parse(text, variables)
    for method, name, attempt in (("Publish", "paid-7", "A" * 22 + "=="), ("Prepare", "paid-6", "B" * 21 + "A==")):
        path = f"tmc.v1.MessageService/{method}"  # what the pages talk about
        known = Line(line.address, path, authority=line.authority, plaintext=line.plaintext)
        known.headers = [("tmc-app", "orders"), ("authorization", f"Bearer {key}")]
        known.data = {"topic": "order.paid", "key": name, "attemptId": attempt}
        known.run()
    assert line.run()
