"""Built-in delivery to a consumer that asks for copies and reads none: bounded memory, no second copies, then the cut."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_common.protocol import consumption_pb2, message_pb2, message_pb2_grpc
from tmc_server.delivery import stream
from tmc_server.delivery.stream import StreamLimits
from tmc_storm.eventually import eventually

_PATH = "/tmc.v1.ConsumptionService/Subscribe"
_LIMITS = StreamLimits(bytes=1 << 20, patience_s=1.0)


def test_a_consumer_that_never_reads_is_cut_and_another_one_gets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream.StreamOutlet.__init__, "__defaults__", (_LIMITS, None, None))
    ended = threading.Event()

    def greedy() -> Iterator[consumption_pb2.SubscribeRequest]:
        yield consumption_pb2.SubscribeRequest(topics=["slow.topic"], credit=10_000)
        for _ in range(9):
            yield consumption_pb2.SubscribeRequest(credit=10_000)
        ended.wait()

    with RunningCenter(f"sqlite:///{tmp_path}/c.db", open_to_all=True) as center:
        streams = center.server.parts.outlets.streams
        assert streams is not None
        made: list[stream.ConsumerStream] = []
        opened = streams.open
        monkeypatch.setattr(streams, "open", lambda *arguments: made.append(opened(*arguments)) or made[-1])
        with grpc.insecure_channel(center.address) as channel:
            call = channel.stream_stream(_PATH, consumption_pb2.SubscribeRequest.SerializeToString, lambda data: data)(
                greedy(), metadata=center.as_app("coupons")
            )
            center.subscribed()
            eventually(lambda: made and made[0].credit == 10_000)
            items = [
                message_pb2.PublishRequest(
                    topic="slow.topic", key=str(number), body=bytes(200_000), attempt_id=os.urandom(16)
                )
                for number in range(60)
            ]
            publish = message_pb2_grpc.MessageServiceStub(channel).PublishMany
            peak = 0
            for item in items:
                publish(message_pb2.PublishManyRequest(items=[item]), metadata=center.as_app("orders"))
                peak = max(peak, made[0].unwritten_bytes)
            assert 0 < peak <= _LIMITS.bytes
            eventually(lambda: not made[0].open)
            eventually(lambda: (made[0].unwritten, made[0].unwritten_bytes) == (0, 0))
            with pytest.raises(grpc.RpcError, match="open another one"):
                list(call)
            ended.set()
        got: set[str] = set()
        with tmc.connect(center.address, app="coupons") as coupons:
            consumer = tmc.Consumer(coupons)

            @consumer.listener("slow.topic")
            def handle(body: bytes, message: tmc.Message) -> None:
                got.add(message.key)

            with consumer:
                eventually(lambda: len(got) == 60)
