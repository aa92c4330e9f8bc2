"""Partial updates: an update mask changes what it names, in the transaction of the change, whoever else changes something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from tests.support.center import RunningCenter
from tmc_common.protocol import admin_pb2, types_pb2


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder: Path = tmp_path_factory.mktemp("updates")
    with RunningCenter(f"sqlite:///{folder}/tmc.db", checks={"allow": ["127.0.0.1/32:*"]}) as made:
        yield made


def ask(center: RunningCenter, method: str, request: Any) -> Any:
    with grpc.insecure_channel(center.address) as channel:
        return getattr(center.admin(channel), method)(request, metadata=center.operator)


def test_only_the_named_fields_of_a_subscriptions_policy_change(center: RunningCenter) -> None:
    first = types_pb2.RetryPolicy(kind=types_pb2.RETRY_KIND_EXPONENTIAL, interval_ms=700, max_retry=4, cap_ms=9000)
    where = {"topic": "order.paid", "app": "stranger"}
    ask(center, "RegisterSubscription", admin_pb2.RegisterSubscriptionRequest(**where, retry=first))
    changed = ask(
        center,
        "RegisterSubscription",
        admin_pb2.RegisterSubscriptionRequest(
            **where, retry=types_pb2.RetryPolicy(max_retry=9), update_mask=FieldMask(paths=["retry.max_retry"])
        ),
    )
    first.max_retry = 9
    assert changed.retry == first


def test_only_the_named_target_and_fields_of_a_topics_checks_change(center: RunningCenter) -> None:
    def target(name: str, path: str) -> admin_pb2.CheckTarget:
        return admin_pb2.CheckTarget(name=name, kind="http", address="127.0.0.1:1", options={"path": path})

    def change(**fields: Any) -> Any:
        return ask(center, "SetTopicCheck", admin_pb2.SetTopicCheckRequest(topic="order.paid", untried=True, **fields))

    change(targets=[target("", "/a"), target("eu", "/b"), target("us", "/c")], retry={"interval_ms": 500})
    change(targets=[target("eu", "/new")], update_mask=FieldMask(paths=["targets"]), removed_targets=["us"])
    change(retry={"max_retry": 3}, update_mask=FieldMask(paths=["retry.max_retry"]))
    found = ask(center, "GetTopicCheck", admin_pb2.GetTopicCheckRequest(topic="order.paid"))
    assert {each.name: each.options["path"] for each in found.targets} == {"": "/a", "eu": "/new"}
    assert (found.retry.interval_ms, found.retry.max_retry) == (500, 3)


def test_a_topics_settings_change_one_by_one(center: RunningCenter) -> None:
    ask(center, "UpdateTopic", admin_pb2.UpdateTopicRequest(name="order.paid", transaction_time_ms=2500))
    changed = ask(center, "UpdateTopic", admin_pb2.UpdateTopicRequest(name="order.paid", open_limit=77))
    assert (changed.transaction_time_ms, changed.open_limit) == (2500, 77)


@pytest.mark.parametrize(
    ("method", "request_", "code", "text"),
    [
        (
            "RegisterSubscription",
            admin_pb2.RegisterSubscriptionRequest(
                topic="order.paid", app="coupons", update_mask=FieldMask(paths=["retry.interval"])
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            "update_mask",
        ),
        (
            "SetTopicCheck",
            admin_pb2.SetTopicCheckRequest(topic="order.paid", update_mask=FieldMask(paths=["tls"])),
            grpc.StatusCode.INVALID_ARGUMENT,
            "update_mask",
        ),
        ("UpdateTopic", admin_pb2.UpdateTopicRequest(name="nobody.knows"), grpc.StatusCode.NOT_FOUND, "topic"),
        (
            "UpdateTopic",
            admin_pb2.UpdateTopicRequest(name="order.paid", open_limit=0),
            grpc.StatusCode.INVALID_ARGUMENT,
            "open_limit",
        ),
    ],
)
def test_what_cannot_be_changed_is_refused(
    center: RunningCenter, method: str, request_: Any, code: grpc.StatusCode, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        ask(center, method, request_)
    assert refused.value.code() is code
    assert text in refused.value.details()
