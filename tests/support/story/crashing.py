"""A consumer whose process dies in the handler of messages that begin with `bad`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import tmc_client as tmc

center = tmc.connect(os.environ["STORY_ADDRESS"], app="coupons", key=os.environ["STORY_KEY"])
consumer = tmc.Consumer(center, concurrency=4, prefetch=40)


def _handle(messages: Sequence[tmc.Message]) -> None:
    with open(f"{os.environ['STORY_FOLDER']}/copies", "a") as file:
        file.writelines(f"{message.key} {message.attempt} {os.getpid()}\n" for message in messages)
    if any(message.key.startswith("bad") for message in messages):
        os._exit(1)


if os.environ.get("STORY_LISTENER") == "batch":

    @consumer.batch_listener("order.paid", max_messages=10, max_wait=timedelta(milliseconds=20))
    def handle_batch(bodies: list[bytes], messages: list[tmc.Message]) -> None:
        _handle(messages)

elif os.environ.get("STORY_LISTENER") == "asyncio":

    @consumer.listener("order.paid")
    async def handle_async(body: bytes, message: tmc.Message) -> None:
        _handle([message])

else:

    @consumer.listener("order.paid")
    def handle(body: bytes, message: tmc.Message) -> None:
        _handle([message])
