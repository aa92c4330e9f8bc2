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
_LOST = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
"""Whether the request was heard is not known: the next server knows."""


class RefusedOverHttp(Exception):
    """The center does not take a message, and repeating it is no use; or its answer is none that docs/http.md describes."""


class HttpPublisher:
    """A caller that asks one server after the other until a message is stored."""

    def __init__(self, addresses: Sequence[str], app: str, key: str) -> None:
        """addresses: host:port of each server."""
        headers = {"tmc-app": app, "authorization": f"Bearer {key}"}
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        self._urls = itertools.cycle(f"http://{address}/v1/messages:publish" for address in addresses)

    def close(self) -> None:
        self._client.close()

    def publish(self, order: Order) -> None:
        """Publish the message of an order: the same attempt until it is answered. Raises RefusedOverHttp."""
        request = {
            "topic": order.topic,
            "key": order.key,
            "contentType": "application/json",
            "body": _base64(json.dumps(order.body).encode()),
            "attemptId": _base64(tmc.new_attempt_id()),
            "delayMs": order.delay_s * 1000,
        }
        while not self._is_stored(request):
            time.sleep(_PAUSE_S)

    def _is_stored(self, request: dict[str, object]) -> bool:
        """Ask once. Returns False: repeat it."""
        try:
            answer = self._client.post(next(self._urls), json=request)
        except _LOST:
            return False
        if answer.status_code in (429, 503):
            return False
        refused = RefusedOverHttp(f"{answer.status_code} {answer.text[:300]}")
        try:
            said = answer.json()
            if answer.status_code == 200 and said["state"] == "MESSAGE_STATE_COMMITTED" and said["messageId"]:
                return True
            is_locked = said["reason"] == "ROW_LOCKED"
        except (ValueError, LookupError, TypeError) as exc:
            raise refused from exc
        if is_locked:
            return False
        raise refused


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
