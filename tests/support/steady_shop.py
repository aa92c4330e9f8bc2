"""A service with the SDK that PYTHONPATH leads to: it sends and consumes until a line comes, and prints what it saw.

Arguments: the addresses of servers, the keys of orders and coupons, a name for its messages.
"""

from __future__ import annotations

import json
import sys
import threading
from datetime import timedelta

import tmc_client as tmc

_THREADS = 3
_LONG = timedelta(seconds=60)


def main(addresses: str, orders_key: str, coupons_key: str, name: str) -> None:
    orders = tmc.connect(addresses, app="orders", key=orders_key)
    consumer = tmc.Consumer(tmc.connect(addresses, app="coupons", key=coupons_key))
    answered: list[str] = []
    failed: list[str] = []
    consumed: list[str] = []
    stopping = threading.Event()

    @consumer.listener("order.paid")
    def paid(body: bytes, message: tmc.Message) -> None:
        consumed.append(message.key)

    def produce(number: int) -> None:
        count = 0
        while not stopping.wait(0.01):
            key = f"{name}-{number}-{count}"
            try:
                orders.submit(orders.prepare("order.paid", b"", key=key, timeout=_LONG), timeout=_LONG)
            except tmc.TmcError as exc:
                failed.append(f"{key}: {exc!r}")
            else:
                answered.append(key)
            count += 1

    consumer.start()
    threads = [threading.Thread(target=produce, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    print(tmc.__file__, flush=True)
    sys.stdin.readline()
    stopping.set()
    for thread in threads:
        thread.join()
    print(len(answered), flush=True)
    sys.stdin.readline()  # by then, all of it is acked
    consumer.stop(timedelta(seconds=10))
    print(json.dumps({"answered": answered, "failed": failed, "consumed": consumed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
