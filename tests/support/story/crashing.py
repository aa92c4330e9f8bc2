"""A consumer whose process dies in the handler of messages that begin with `bad`."""

from __future__ import annotations

import os

import tmc_client as tmc

center = tmc.connect(os.environ["STORY_ADDRESS"], app="coupons", key=os.environ["STORY_KEY"])
consumer = tmc.Consumer(center, concurrency=1, prefetch=5)


@consumer.listener("order.paid")
def handle(body: bytes, message: tmc.Message) -> None:
    with open(f"{os.environ['STORY_FOLDER']}/copies", "a") as file:
        file.write(f"{message.key} {message.attempt} {os.getpid()}\n")
    if message.key.startswith("bad"):
        os._exit(1)
