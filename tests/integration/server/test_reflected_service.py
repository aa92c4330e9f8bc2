"""A service that knows nothing of the center, asked through its reflection as docs/checks.md shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tmc_client as tmc
from tests.integration.server.test_checks import Operator
from tests.support import order_service
from tests.support.center import RunningCenter
from tmc_common.protocol import admin_pb2, types_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

COMMITTED, ROLLED_BACK = types_pb2.MESSAGE_STATE_COMMITTED, types_pb2.MESSAGE_STATE_ROLLED_BACK


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[RunningCenter]:
    with RunningCenter(
        f"sqlite:///{tmp_path_factory.mktemp('foreign')}/c.db",
        discovery={"kind": "recorded"},
        checks={"allow": ["127.0.0.1/32:*"]},
        delivery={"scan_seconds": 0.05},
    ) as made:
        made.subscribe("foreign.paid", "coupons", topic_settings={"transaction_time_ms": 300})
        yield made


def test_a_grpc_service_that_knows_nothing_of_us(running: RunningCenter) -> None:
    port = free_port()
    server = order_service.serve(port)
    options = {
        "method": "shop.v1.OrderService/GetOrder",
        "request": '{"order_id": "{key}"}',
        "verdict": "status",
        "COMMIT": "ORDER_STATUS_PAID",
        "ROLLBACK": "ORDER_STATUS_CANCELLED",
        "UNKNOWN": "ORDER_STATUS_OPEN",
        "echo": "order_id",
    }
    target = admin_pb2.CheckTarget(kind="reflection", address=f"127.0.0.1:{port}", options=options)
    Operator(running).set_check(target, topic="foreign.paid")
    with tmc.connect(running.address, app="orders", key=running.keys["orders"]) as orders:
        paid, cancelled, open_ = (orders.prepare("foreign.paid", {}, key=key) for key in ("o-1", "o-2", "open"))
        eventually(lambda: orders.get_message(paid.message_id).state == COMMITTED)
        eventually(lambda: orders.get_message(cancelled.message_id).state == ROLLED_BACK)
        report = Operator(running)("CheckNow", admin_pb2.CheckNowRequest(message_id=open_.message_id))
        assert (report.verdict, report.answer) == (types_pb2.VERDICT_UNKNOWN, "status = 1/ORDER_STATUS_OPEN")
        assert report.request == 'shop.v1.OrderService/GetOrder {"order_id": "open"}'
    server.stop(0)
