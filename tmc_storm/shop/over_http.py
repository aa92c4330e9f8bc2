"""Messages without a transaction, sent as a service without the SDK sends them: JSON over HTTP, see docs/http.md."""

from __future__ import annotations

import base64
import itertools
import json
import time
from collections.abc import Sequence

import httpx

import tmc_client as tmc
from tmc_storm.shop.orders import Order

_TIMEOUT_S = 5.0
_PAUSE_S = 0.2


class HttpPublisher:
    """Asks one server after the other until the message is stored."""

    def __init__(self, addresses: Sequence[str], app: str, key: str) -> None:
        """addresses: host:port of each server."""
        headers = {"tmc-app": app, "authorization": f"Bearer {key}"}
        clients = [
            httpx.Client(base_url=f"http://{address}", headers=headers, timeout=_TIMEOUT_S, trust_env=False)
            for address in addresses
        ]
        self._clients = itertools.cycle(clients)

    def publish(self, order: Order) -> None:
        """Publish the message of an order: the same attempt until it is answered. Raises httpx.HTTPStatusError: it is refused."""
        request = {
            "topic": order.topic,
            "key": order.key,
            "contentType": "application/json",
            "body": _base64(json.dumps(order.body).encode()),
            "attemptId": _base64(tmc.new_attempt_id()),
            "delayMs": order.delay_s * 1000,
        }
        while True:
            try:
                answer = next(self._clients).post("/v1/messages:publish", json=request)
            except httpx.TransportError:
                pass  # whether it was heard is not known: the next server knows
            else:
                if answer.status_code not in (429, 503):
                    answer.raise_for_status()
                    return
            time.sleep(_PAUSE_S)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
