"""The client for Go: what it answers to checks, which copies it takes, and its stubs."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pika
import pytest
import sqlalchemy as sa
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.foreign import Process, for_go
from tests.support.go_client import built, has_go
from tmc_client import tables
from tmc_common import signatures
from tmc_common.protocol import (
    check_pb2,
    check_pb2_grpc,
    consumption_pb2,
    message_pb2,
    message_pb2_grpc,
    types_pb2,
)
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.ports import free_port
from tmc_storm.services.postgresql import PostgreSQL
from tmc_storm.services.rabbitmq import RabbitMQ

pytestmark = pytest.mark.services
GO = Path(__file__).parents[3] / "clients" / "go"
_names = itertools.count(1)
COMMIT, ROLLBACK, UNKNOWN = types_pb2.VERDICT_COMMIT, types_pb2.VERDICT_ROLLBACK, types_pb2.VERDICT_UNKNOWN
NOT_NOW, WRONG_LEDGER = check_pb2.UNKNOWN_REASON_NOT_NOW, check_pb2.UNKNOWN_REASON_WRONG_LEDGER

_ACKED, _FAILED = types_pb2.CONSUMPTION_STATE_ACKED, types_pb2.CONSUMPTION_STATE_FAILED


class _Answers:
    """A Go service that answers checks from its ledger, asked by us instead of the center."""

    def __init__(self, center: RunningCenter, engine: sa.Engine, folder: Path) -> None:
        over_grpc, self.over_http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        where = [center.address, center.keys["orders"], *for_go(engine.url), over_grpc, self.over_http]
        self.engine, self.process = engine, Process([built(), "checks", *where], folder / "checks.log")
        eventually(lambda: "answers" in self.process.said())
        with grpc.insecure_channel(center.address) as channel:
            describe = message_pb2_grpc.MessageServiceStub(channel).DescribeChecks
            self.token = describe(message_pb2.DescribeChecksRequest(), metadata=center.as_app("orders")).check_token
        with engine.connect() as connection:
            self.ledger_id: bytes = connection.scalars(sa.select(tables.ledger_info.c.ledger_id)).one()
        self.channel = grpc.insecure_channel(over_grpc)
        self._http = httpx.Client(headers={"tmc-check-token": self.token})

    def question(self, message_id: str, **other: Any) -> check_pb2.CheckRequest:
        values = {"ledger_id": self.ledger_id, "created_ms": 10**13, "attempt_id": b"a" * 16} | other
        return check_pb2.CheckRequest(message_id=message_id, topic="order.paid", key="k", **values)

    def ask(self, question: check_pb2.CheckRequest, token: str | None = None) -> check_pb2.CheckResponse:
        call = check_pb2_grpc.CheckServiceStub(self.channel).CheckMany
        shown = [("tmc-check-token", self.token if token is None else token)]
        request = check_pb2.CheckManyRequest(items=[question])
        answer: check_pb2.CheckResponse = call(request, metadata=shown, timeout=30, wait_for_ready=True).results[0]
        assert answer.message_id == question.message_id
        return answer

    def ask_http(self, question: check_pb2.CheckRequest, method: str) -> dict[str, Any]:
        url = f"http://{self.over_http}/tmc"
        if method == "GET":
            said = {"tmc-message-id": question.message_id, "tmc-topic": question.topic}
            said |= {"tmc-attempt-id": question.attempt_id.hex(), "tmc-ledger-id": question.ledger_id.hex()}
            said["tmc-created-ms"] = str(question.created_ms)
            query = {"bizID": "orders", "messageKey": question.key}
            shown: dict[str, Any] = self._http.get(url, params=query, headers=said).raise_for_status().json()
            return shown
        item = {
            "messageId": question.message_id,
            "topic": question.topic,
            "bizID": "orders",
            "messageKey": question.key,
        }
        item |= {"attemptId": question.attempt_id.hex(), "ledgerId": question.ledger_id.hex()}
        asked = {"items": [item | {"createdMs": question.created_ms}]}
        found: dict[str, Any] = self._http.post(url, json=asked).raise_for_status().json()["results"][0]
        return found

    def states(self) -> dict[str, int]:
        with self.engine.connect() as connection:
            rows = connection.execute(sa.select(tables.ledger.c.message_id, tables.ledger.c.state))
            return {row.message_id: row.state for row in rows}

    def close(self) -> None:
        self.channel.close()
        self._http.close()
        self.process.kill()
        self.engine.dispose()


def _row(message_id: str, state: int) -> dict[str, Any]:
    values = {"message_id": message_id, "state": state, "topic": "order.paid", "message_key": "k"}
    return values | {"attempt_id": b"a" * 16, "created_ms": 1, "settled_ms": 1}


@contextmanager
def _answering(database_server: MariaDB | PostgreSQL, folder: Path) -> Iterator[_Answers]:
    engine = sa.create_engine(database_server.create(f"go_checks_{next(_names)}"))
    with RunningCenter(f"sqlite:///{folder}/c.db", discovery={"kind": "recorded"}) as center:
        answers = _Answers(center, engine, folder)
        try:
            yield answers
        finally:
            answers.close()


def _without_names_in_json(file: FileDescriptorProto) -> FileDescriptorProto:
    """Go has them, Python has not."""
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")
        for nested in message.nested_type:
            for field in nested.field:
                field.ClearField("json_name")
    return file


if has_go():

    def test_checks_are_answered_from_the_ledger(database_server: MariaDB | PostgreSQL, tmp_path: Path) -> None:
        with _answering(database_server, tmp_path) as answers:
            with answers.engine.begin() as connection:
                connection.execute(tables.ledger.insert(), [_row("1-1-01-1", 1), _row("1-1-01-2", 2)])
            ask, question = answers.ask, answers.question
            assert ask(question("1-1-01-1")).verdict == COMMIT
            assert ask(question("1-1-01-2")).verdict == ROLLBACK
            other = ask(question("1-1-01-3", ledger_id=b"b" * 16))
            assert (other.verdict, other.unknown_reason) == (UNKNOWN, WRONG_LEDGER)
            assert answers.ask_http(question("1-1-01-3"), "GET")["status"] == "UNKNOWN"
            assert "1-1-01-3" not in answers.states()
            assert ask(question("1-1-01-3")).verdict == ROLLBACK  # and nothing can change that
            assert answers.states()["1-1-01-3"] == 2
            assert answers.ask_http(question("1-1-01-4"), "POST")["status"] == "ROLLBACK"
            assert answers.ask_http(question("1-1-01-1"), "GET")["status"] == "COMMIT"
            with answers.engine.begin() as connection:
                connection.execute(tables.ledger_info.update().values(horizon_ms=10**13))
            old = ask(question("1-1-01-5"))
            assert (old.verdict, old.unknown_reason) == (UNKNOWN, 0)
            assert "1-1-01-5" not in answers.states()

    def test_an_open_transaction_is_not_answered_for(database_server: MariaDB | PostgreSQL, tmp_path: Path) -> None:
        with _answering(database_server, tmp_path) as answers:
            with answers.engine.begin() as connection:
                connection.execute(tables.ledger.insert(), [_row("1-1-01-1", 1)])
                answer = answers.ask(answers.question("1-1-01-1"))
                assert (answer.verdict, answer.unknown_reason) == (UNKNOWN, NOT_NOW)
            assert answers.ask(answers.question("1-1-01-1")).verdict == COMMIT

    def test_checks_of_strangers_are_refused(database_server: MariaDB | PostgreSQL, tmp_path: Path) -> None:
        with _answering(database_server, tmp_path) as answers:
            assert answers.ask(answers.question("1-1-01-1")).verdict == ROLLBACK
            for token in ("", "wrong"):
                with pytest.raises(grpc.RpcError) as caught:
                    answers.ask(answers.question("1-1-01-2"), token)
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            with httpx.Client(headers={"tmc-check-token": "wrong"}) as stranger:
                assert stranger.post(f"http://{answers.over_http}/tmc", json={"items": []}).status_code == 403
            assert "1-1-01-2" not in answers.states()

    def test_copies_that_the_center_did_not_sign_have_no_effect(
        postgresql: PostgreSQL, rabbitmq: RabbitMQ, tmp_path: Path
    ) -> None:
        engine = sa.create_engine(postgresql.create(f"go_coupons_{next(_names)}"))
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE coupons (name VARCHAR(20) NOT NULL)"))

        def effects() -> list[str]:
            with engine.connect() as connection:
                return sorted(connection.scalars(sa.text("SELECT name FROM coupons")))

        with RunningCenter(
            f"sqlite:///{tmp_path}/c.db",
            delivery={"kind": "rabbitmq", "scan_seconds": 0.05},
            rabbitmq={"url": rabbitmq.url},
        ) as center:
            app, topic = f"go{next(_names)}", "order.paid"
            policy = types_pb2.RetryPolicy(interval_ms=3_600_000, max_retry=0)
            made = center.subscribe(topic, app, retry=policy, topic_settings={"open_limit": 100_000})
            command = [built(), "coupons", center.address, app, center.keys[app], *for_go(engine.url), "guest", "guest"]
            with (
                rabbitmq.connect() as connection,
                tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders,
            ):
                channel = connection.channel()
                ids = [orders.publish(topic, b"real", key=key, headers={"color": "red", "x-y": "z"}) for key in "ab"]
                eventually(lambda: channel.queue_declare(made.queue, passive=True).method.message_count == 2)
                _, genuine, body = channel.basic_get(made.queue, auto_ack=True)
                channel.basic_publish("", made.queue, b"changed", genuine)
                other = "b" if genuine.message_id == ids[0] else "a"
                signature = (genuine.headers or {})[signatures.HEADER]
                genuine.headers[signatures.HEADER] = "v1=00000000" + signature[11:]
                channel.basic_publish("", made.queue, body, genuine)
                channel.basic_publish("", made.queue, b"unsigned", pika.BasicProperties(message_id=ids[0], type=topic))
                consumer = Process(command, tmp_path / "coupons.log")
                eventually(lambda: "forged copies" in center.run_admin("list-alerts").stdout)
                for key in ("reject", "panic", "later"):
                    orders.publish(topic, key.encode(), key=key)
                eventually(lambda: effects() == ["later", "real"])
                eventually(
                    lambda: (
                        [
                            next(each for each in center.detail(topic, key).consumptions if each.app == app).state
                            for key in (other, "reject", "panic", "later")
                        ]
                        == [_ACKED, _FAILED, _FAILED, _ACKED]
                    )
                )
                consumer.stop()
        engine.dispose()

    def test_a_handler_whose_time_is_over_can_still_say_so(postgresql: PostgreSQL, tmp_path: Path) -> None:
        url = sa.make_url(postgresql.create(f"go_coupons_{next(_names)}"))
        with (
            RunningCenter(f"sqlite:///{tmp_path}/c.db", delivery={"scan_seconds": 0.05}) as center,
            tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders,
        ):
            where = [center.address, "coupons", center.keys["coupons"], *for_go(url), "", ""]
            consumer = Process([built(), "coupons", *where], tmp_path / "coupons.log")
            orders.publish("order.paid", b"", key="slow")
            eventually(lambda: "slow began" in consumer.said())
            consumer.stop()
            assert [each.error for each in center.detail("order.paid", "slow").failed_attempts] == ["its time was over"]

    def test_a_key_in_progress_keeps_no_transaction_open(postgresql: PostgreSQL, tmp_path: Path) -> None:
        engine = sa.create_engine(postgresql.create(f"go_shop_{next(_names)}"))
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE orders (name VARCHAR(20) PRIMARY KEY)"))
        with (
            RunningCenter(f"sqlite:///{tmp_path}/c.db", discovery={"kind": "recorded"}) as center,
            tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders,
        ):
            other = orders.prepare("order.paid", b"", key="1")
            where = [center.address, center.keys["orders"], *for_go(engine.url), f"127.0.0.1:{free_port()}"]
            shop = Process([built(), "shop", *where, 2], tmp_path / "shop.log")
            eventually(lambda: "KEY_IN_PROGRESS" in shop.said(), seconds=4)  # sooner than prepares give up
            with engine.connect() as connection:
                assert connection.scalars(sa.text("SELECT name FROM orders")).all() == []
            orders.rollback(other)
            eventually(lambda: "all is sold" in shop.said())
            with engine.connect() as connection:
                assert connection.scalars(sa.text("SELECT name FROM orders")).all() == ["1"]
            assert center.detail("order.paid", "1").message.state == types_pb2.MESSAGE_STATE_COMMITTED
            shop.kill()
        engine.dispose()

    def test_its_parts() -> None:
        """Run the tests in Go, of parts whose work no process shows."""
        done = subprocess.run(["go", "test", "./..."], cwd=GO, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_the_stubs_are_those_of_the_protos() -> None:
        described = subprocess.run([built(), "describe"], capture_output=True, check=True, timeout=60).stdout
        for file in FileDescriptorSet.FromString(described).file:
            ours = FileDescriptorProto()
            modules = (types_pb2, message_pb2, consumption_pb2, check_pb2)
            next(each for each in modules if each.DESCRIPTOR.name == file.name).DESCRIPTOR.CopyToProto(ours)
            assert _without_names_in_json(file) == _without_names_in_json(ours)
