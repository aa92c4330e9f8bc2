"""Every RPC by every caller about what is their own, of others, and missing: others' things look as if they were missing.

Requests are made from the descriptors, with random values in the fields that say nothing about whose it is. MATRIX_SEED
repeats a run; `--long`: 5,000 pairs of calls.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

import tmc_client as tmc
from tests.integration.server.test_api import Api
from tests.integration.server.test_operators import OURS, ROLES, THEIRS, Setting
from tests.support.center import RunningCenter
from tests.support.dose import LONG
from tmc_common.protocol import admin_pb2
from tmc_server.domain.rights import RIGHTS
from tmc_server.rpc.server import SERVICES
from tmc_storm.eventually import eventually

PAIRS = 5_000 if LONG else 400
MARK = "pay-secret"
NOT_ASKED = {
    "RotateOperatorToken": "it would end the caller's token",
    "Subscribe": "a stream",
    "Produce": "a stream of calls that are asked here one by one",
    "GetOverview": "it counts, and names nothing",
}


@dataclass(frozen=True, kw_only=True)
class Whose:
    """Values for the fields that name something. message_id, job and proposal belong to the topic."""

    topic: str
    key: str
    message_id: str
    job: int
    proposal: int


@dataclass(frozen=True, kw_only=True)
class Caller:
    """apps: methods of apps, else those of operators."""

    name: str
    metadata: Sequence[tuple[str, str]]
    is_app: bool


class Matrix:
    def __init__(self, center: RunningCenter, channel: grpc.Channel) -> None:
        self.setting = Setting(center, channel)
        self.api = Api(center, channel)
        self.center = center
        center.subscribe("order.more", "coupons")
        made = self.api("AdminService/RegisterApp", admin_pb2.RegisterAppRequest(id="payments"))
        center.keys["payments"] = made.key
        self.api("AdminService/RegisterTopic", admin_pb2.RegisterTopicRequest(name="pay.secret", owner="payments"))
        with tmc.connect(center.address, app="payments", key=made.key) as payments:
            secret = payments.publish("pay.secret", MARK.encode(), key=f"{MARK}-key")
            payments.publish("pay.secret", MARK.encode(), key=f"{MARK}-2")
        with tmc.connect(center.address, app="coupons", key=center.keys["coupons"]) as coupons:
            consumer = tmc.Consumer(coupons)

            @consumer.listener(OURS)
            @consumer.listener(THEIRS)
            def refuse(_body: bytes) -> None:
                raise tmc.Reject("not today")

            with consumer:
                alerts = admin_pb2.ListAlertsRequest()
                eventually(
                    lambda: (
                        {each.topic for each in self.api("AdminService/ListAlerts", alerts).alerts} >= {OURS, THEIRS}
                    )
                )
        self.theirs = Whose(
            topic="pay.secret",
            key=f"{MARK}-key",
            message_id=secret,
            job=self.setting.jobs[THEIRS],
            proposal=self.setting.proposals[THEIRS],
        )
        self.missing = Whose(
            topic="pay.nothing", key=f"{MARK}-no", message_id="999999-1-05-77", job=999_999, proposal=999_999
        )
        self.callers = [Caller(name=app, metadata=center.as_app(app), is_app=True) for app in ("orders", "coupons")]
        for role in ROLES:
            token = self.setting.tokens[role, True]
            self.callers.append(Caller(name=role, metadata=[("authorization", f"Bearer {token}")], is_app=False))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    folder: Path = tmp_path_factory.mktemp("matrix")
    with RunningCenter(f"sqlite:///{folder}/tmc.db") as center, grpc.insecure_channel(center.address) as channel:
        yield Matrix(center, channel)


def methods(is_app: bool) -> list[MethodDescriptor]:
    return [
        method
        for service in SERVICES.values()
        for method in service.methods
        if method.name not in NOT_ASKED
        and (RIGHTS[f"{service.full_name}/{method.name}"].role is None) is is_app
        and not method.server_streaming
    ]


def a_value(field: FieldDescriptor, seed: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return seed.choice(["", "coupons", "orders", "x" * 300, "\n", "ü"])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return seed.randbytes(seed.choice([0, 16, 40]))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return seed.choice([value.number for value in field.enum_type.values])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return seed.choice([True, False])
    return seed.choice([0, 1, 2, 1000, 2**31 - 1])


def fill(message: Message, whose: Whose, seed: random.Random) -> None:
    """Fields that name something are filled with what is whose; the others from the seed."""
    descriptor: Descriptor = message.DESCRIPTOR
    for field in descriptor.fields:
        is_named = field.name in ("topic", "key", "message_id", "job", "proposal") or (
            field.name == "name" and "Topic" in descriptor.name
        )
        if is_named and not field.is_repeated:
            setattr(message, field.name, whose.topic if field.name == "name" else getattr(whose, field.name))
        elif field.message_type is not None:
            if field.is_repeated:
                if not field.message_type.GetOptions().map_entry:
                    fill(getattr(message, field.name).add(), whose, seed)
            elif field.name == "filter" or seed.random() < 0.3:
                fill(getattr(message, field.name), whose, seed)
        elif field.is_repeated:
            getattr(message, field.name).append(whose.topic if field.name == "topics" else a_value(field, seed))
        elif seed.random() < 0.5:
            setattr(message, field.name, a_value(field, seed))
    if {"message_id", "topic"} <= set(descriptor.fields_by_name) and seed.random() < 0.5:
        message.ClearField("topic" if seed.random() < 0.5 else "message_id")


def asked(method: MethodDescriptor, whose: Whose, seed: int) -> Message:
    made: Message = message_factory.GetMessageClass(method.input_type)()
    fill(made, whose, random.Random(seed))
    return made


def heard(answer: Any, whose: Whose) -> object:
    """Return what a caller learns from an answer: code, reason and field, or the whole message.

    Not the time, and not the name of the topic that was asked for.
    """
    if isinstance(answer, tuple):
        return answer
    if "now_ms" in answer.DESCRIPTOR.fields_by_name:
        answer.ClearField("now_ms")
    return str(answer).replace(whose.topic, "TOPIC")


def test_what_belongs_to_others_looks_as_if_it_were_missing(matrix: Matrix) -> None:
    first = int(os.environ.get("MATRIX_SEED", random.randrange(1 << 30)))
    seeds = random.Random(first)
    everything = [(caller, method) for caller in matrix.callers for method in methods(caller.is_app)]
    refused: dict[str, int] = {}
    for number in range(PAIRS):
        caller, method = everything[number % len(everything)]
        path, seed = f"{method.containing_service.name}/{method.name}", seeds.randrange(1 << 30)
        answers = []
        for whose in (matrix.theirs, matrix.missing):
            answer = matrix.api(path, asked(method, whose, seed), caller.metadata)
            assert isinstance(answer, tuple) or MARK.encode() not in answer.SerializeToString(), (
                path,
                caller.name,
                first,
            )
            assert not isinstance(answer, tuple) or answer[0] not in ("INTERNAL", "UNKNOWN"), (path, caller.name, first)
            answers.append(heard(answer, whose))
        assert answers[0] == answers[1], (path, caller.name, asked(method, matrix.theirs, seed), f"MATRIX_SEED={first}")
        refused[path] = refused.get(path, 0) + isinstance(answers[0], tuple)
    assert len(refused) == len({(m.containing_service.name, m.name) for _, m in everything})
    assert sum(refused.values()) > PAIRS // 3  # it is not that nothing is asked


@pytest.mark.parametrize("role", ROLES)
def test_pages_of_lists_say_nothing_about_the_rows_of_others(matrix: Matrix, role: str) -> None:
    """Each list, by pages of one row, has as many pages as the caller has rows, whatever lies between."""
    token = matrix.setting.tokens[role, True]
    lists = [
        method
        for method in methods(is_app=False)
        if method.name.startswith("List") and "page_token" in method.input_type.fields_by_name
    ]
    seen = set()
    for method in lists:
        tokens, request = [], message_factory.GetMessageClass(method.input_type)()
        request.page_size = 1
        while True:
            answer = matrix.setting.call(method.name, request, token)
            if isinstance(answer, tuple):
                break
            assert not any(name in str(answer) for name in (MARK, THEIRS, "pay.secret")), method.name
            rows = next((value for field, value in answer.ListFields() if field.is_repeated), ())
            assert len(rows) == 1 or not answer.next_page_token, method.name
            tokens.append(answer.next_page_token)
            seen.add(method.name)
            if not answer.next_page_token:
                break
            request.page_token = answer.next_page_token
        assert len(tokens) == len(set(tokens)), method.name
    assert {"ListMessages", "ListConsumptions", "ListBulkJobs", "ListProposals", "ListAlerts"} <= seen


def test_what_is_their_own_is_shown(matrix: Matrix) -> None:
    """So that the tests above do not hold because nothing is shown."""
    token = matrix.setting.tokens["viewer", True]
    found = matrix.setting.call("ListMessages", admin_pb2.ListMessagesRequest(), token)
    assert {message.topic for message in found.messages} == {OURS}
