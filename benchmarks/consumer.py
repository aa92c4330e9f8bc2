"""A consumer process that does nothing: usage: consumer.py ADDRESS APP KEY TOPIC [PREFETCH].

Says "ready", ends when stdin does.
"""

from __future__ import annotations

import sys

import tmc_client as tmc


def main(address: str, app: str, key: str, topic: str, prefetch: str = "") -> None:
    with tmc.connect(address, app=app, key=key) as center:
        consumer = tmc.Consumer(center, prefetch=int(prefetch) if prefetch else None)

        @consumer.listener(topic)
        def handle(body: bytes) -> None:
            """Acked at once."""

        with consumer:
            print("ready", flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
