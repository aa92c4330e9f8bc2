"""Reflection as grpcurl uses it, and the grpcurl lines of the docs, replayed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.support.center import RunningCenter
from tests.support.certificates import for_loopback
from tests.support.grpcurl import VERSIONS, Line, Reflection
from tmc_common.protocol import admin_pb2, admin_pb2_grpc
from tmc_server.app import initialize
from tmc_server.config import Config

DOCS = Path(__file__).parents[3] / "docs"


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
        assert {
            "tmc.v1.MessageService",
            "tmc.v1.ConsumptionService",
            "tmc.v1.AdminService",
            "grpc.health.v1.Health",
            *VERSIONS,
        } <= set(services)
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


SYMBOLS = [
    "tmc.v1.MessageService",
    "tmc.v1.MessageService.Prepare",
    "tmc.v1.AdminService.ListTopics",
    "tmc.v1.PrepareRequest",
    "tmc.v1.PrepareRequest.topic",
    "tmc.v1.PrepareManyRequest.items",
    "tmc.v1.MessageState",
    "tmc.v1.MESSAGE_STATE_COMMITTED",
    "tmc.v1.MessageState.MESSAGE_STATE_COMMITTED",
    "grpc.health.v1.Health.Check",
    "grpc.health.v1.HealthCheckResponse.ServingStatus",
    "grpc.health.v1.HealthCheckResponse.SERVING",
    "tmc.v1.CheckTarget.OptionsEntry",
    "grpc.reflection.v1alpha.ServerReflection.ServerReflectionInfo",
    "grpc.reflection.v1.ServerReflection.ServerReflectionInfo",
    "grpc.reflection.v1.ServerReflectionRequest.host",
    "google.rpc.ErrorInfo",
    "google.rpc.BadRequest.FieldViolation",
    "google.rpc.RetryInfo",
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("symbol", SYMBOLS)
def test_every_symbol_leads_to_its_file_with_all_its_imports(center: RunningCenter, version: str, symbol: str) -> None:
    """Methods by their own name too: that is how ghz and other clients ask."""
    with grpc.insecure_channel(center.address) as channel:
        answer = Reflection(channel, [version]).ask(file_containing_symbol=symbol)
    assert not answer.HasField("error_response"), answer.error_response
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(data)
        for data in answer.file_descriptor_response.file_descriptor_proto
    ]
    assert files[0].package == symbol[: len(files[0].package)]
    names = {file.name for file in files}
    assert len(names) == len(files)
    assert all(set(file.dependency) <= names for file in files)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unknown_name_is_an_answer_and_the_stream_continues(center: RunningCenter, version: str) -> None:
    extension = reflection_pb2.ExtensionRequest(containing_type="tmc.v1.PrepareRequest", extension_number=1)
    requests = [
        reflection_pb2.ServerReflectionRequest(**asked)
        for asked in (
            {"file_by_filename": "no/such.proto"},
            {"file_containing_symbol": "tmc.v1.Nothing"},
            {"file_containing_extension": extension},
            {"all_extension_numbers_of_type": "tmc.v1.Nothing"},
            {"host": "x"},
            {"all_extension_numbers_of_type": "tmc.v1.PrepareRequest"},
            {"list_services": "*"},
            {"file_by_filename": "tmc/v1/message.proto", "host": "center"},
        )
    ]
    with grpc.insecure_channel(center.address) as channel:
        call = channel.stream_stream(
            f"/{version}/ServerReflectionInfo",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        answers = list(call(iter(requests), timeout=30))
    assert [answer.original_request for answer in answers] == requests
    assert [answer.error_response.error_code for answer in answers] == [5, 5, 5, 5, 3, 0, 0, 0]
    assert list(answers[5].all_extension_numbers_response.extension_number) == []
    assert answers[5].all_extension_numbers_response.base_type_name == "tmc.v1.PrepareRequest"
    assert len(answers[6].list_services_response.service) == 6
    assert answers[7].valid_host == "center"
    first = descriptor_pb2.FileDescriptorProto.FromString(answers[7].file_descriptor_response.file_descriptor_proto[0])
    assert first.name == "tmc/v1/message.proto"


def test_a_load_generator_finds_a_method_by_its_name_and_calls_it(center: RunningCenter, tmp_path: Path) -> None:
    """With ghz where it is installed; otherwise our own client asks the same way."""
    method = "tmc.v1.AdminService.ListTopics"
    program = shutil.which("ghz")
    if program is None:
        with grpc.insecure_channel(center.address) as channel:
            reflection = Reflection(channel)
            found = reflection.method(method)
            assert (found.name, found.containing_service.full_name) == ("ListTopics", "tmc.v1.AdminService")
            topics = reflection.invoke("tmc.v1.AdminService/ListTopics", {}, center.operator)["topics"]
        assert [topic["name"] for topic in topics] == ["order.paid"]
        return
    metadata = json.dumps(dict(center.operator))
    command = [program, "--insecure", "--call", method, "-d", "{}", "-m", metadata, "-n", "5", "-c", "1", "-O", "json"]
    done = subprocess.run([*command, center.address], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["statusCodeDistribution"] == {"OK": 5}


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

    from tmc_server.app import Server

    config = Config.model_validate(
        {
            "server": {"listen": "127.0.0.1:0"},
            "store": {"catalog": f"sqlite:///{folder}/c.db", "change_delay_ms": 1500},
            "tls": {"certificate": certificate, "key": key},
        }
    )
    token = initialize(config) or ""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    center = asyncio.run_coroutine_threadsafe(Server.started(config), loop).result(30)
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
