"""Producers in batches, for tests that need many messages soon."""

from __future__ import annotations

import os

import grpc

from tmc_common.protocol import message_pb2, message_pb2_grpc


def publish_many(address: str, key: str, topic: str, count: int, size: int = 500, app: str = "orders") -> None:
    """Publish `count` messages m-0, m-1, ... in batches."""
    metadata = [("tmc-app", app), ("authorization", f"Bearer {key}")]
    with grpc.insecure_channel(address) as channel:
        stub = message_pb2_grpc.MessageServiceStub(channel)
        for start in range(0, count, size):
            items = [
                message_pb2.PublishRequest(topic=topic, key=f"m-{number}", body=b"x", attempt_id=os.urandom(16))
                for number in range(start, min(count, start + size))
            ]
            while items:
                request = message_pb2.PublishManyRequest(items=items)
                results = stub.PublishMany(request, metadata=metadata, timeout=30).results
                final = [each.error for each in results if each.HasField("error") and not each.error.retry_after_ms]
                assert not final, final[0]
                # On a busy machine a row may be locked, or a catalog's copy too old, for a moment.
                items = [item for item, each in zip(items, results, strict=True) if each.HasField("error")]
