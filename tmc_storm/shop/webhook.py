"""A service that gets messages as webhooks.

usage: python -m tmc_storm.shop.webhook SETTINGS.json. It listens at the settings' `listen` until it is killed, or gets SIGTERM.
It has no inbox of the SDK: it notes the id of each message in the transaction of its effect, as docs/http.md advises.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import uvicorn

from tmc_common.addresses import HostPort
from tmc_storm.shop import books
from tmc_storm.shop.settings import ShopSettings

_DONE, _MALFORMED, _UNSIGNED, _REFUSED, _FAILED, _AWAY = 204, 400, 401, 422, 500, 503
_BATCH = "application/cloudevents-batch+json"
_FORMS = {"application/cloudevents+json": dict, _BATCH: list}
_PATHS = {"/one": books.ACCOUNT, "/batch": books.PAID}
_FINISH_S = 5


class Receiver:
    """An ASGI application that books what is posted to it."""

    def __init__(self, settings: ShopSettings) -> None:
        self._engine = books.engine_of(settings.database)
        self._refused = Path(settings.folder) / f"{settings.app}.refused"
        self._keys = {path: bytes.fromhex(settings.webhook_keys[topic]) for path, topic in _PATHS.items()}

    def close(self) -> None:
        """Close the connections to the books; a later request opens others."""
        self._engine.dispose()

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        """Answer a request."""
        body, is_complete = b"", False
        while not is_complete:
            event = await receive()
            if event["type"] == "http.disconnect":
                return
            body, is_complete = body + event["body"], not event.get("more_body")
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").decode()
        found: Any = None
        with suppress(ValueError):
            found = json.loads(body)
        is_of_its_form = isinstance(found, _FORMS.get(kind, ()))
        status = _MALFORMED
        if not _is_signed(headers, body, self._keys.get(scope["path"], b"")):
            status = _UNSIGNED
        elif scope["method"] == "POST" and is_of_its_form:
            status = await asyncio.to_thread(self._take, found if kind == _BATCH else [found])
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    def _take(self, events: Sequence[dict[str, Any]]) -> int:
        """Book these events in one transaction. Returns: the status of the answer."""
        refused = [event["id"] for event in events if event["data"].get("refuse")]
        if refused:
            if len(events) == 1:
                with self._refused.open("a") as file:
                    file.write(f"{refused[0]}\n")
            return _REFUSED  # a batch comes again, one by one
        if any(event["subject"].endswith("77") and event["tmcattempt"] == 1 for event in events):
            return _FAILED
        try:
            try:
                self._book(events)
            except sa.exc.IntegrityError:
                self._book(events)  # another copy was booked at this moment: now it is seen
        except (sa.exc.OperationalError, sa.exc.IntegrityError, sa.exc.InterfaceError, sa.exc.TimeoutError):
            return _AWAY
        return _DONE

    def _book(self, events: Sequence[dict[str, Any]]) -> None:
        with self._engine.begin() as connection:
            for event in events:
                _book_one(connection, event)


def _is_signed(headers: Mapping[bytes, bytes], body: bytes, key: bytes) -> bool:
    """Return whether one of the signatures is by this key, as Standard Webhooks makes them."""
    content = b".".join([headers.get(b"webhook-id", b""), headers.get(b"webhook-timestamp", b""), body])
    expected = b"v1," + base64.b64encode(hmac.digest(key, content, "sha256"))
    return any(hmac.compare_digest(expected, each) for each in headers.get(b"webhook-signature", b"").split())


def _book_one(connection: sa.Connection, event: dict[str, Any]) -> None:
    if connection.scalar(sa.select(books.seen.c.message_id).where(books.seen.c.message_id == event["id"])):
        return
    connection.execute(books.seen.insert(), {"message_id": event["id"]})
    topic, key, body = event["type"], event["subject"], event["data"]
    connection.execute(
        books.effect.insert(),
        {
            "message_key": key,
            "order_key": key.partition(".order.")[0] if topic == books.ACCOUNT else "",
            "number": body.get("number", 0),
            "at_ms": round(time.time() * 1000),
            "is_intact": books.is_intact(topic, key, body),
        },
    )


def main(path: str) -> None:
    """Run until a signal; requests that were begun are answered, if they take no longer than 5 s."""
    settings = ShopSettings.read(path)
    address = HostPort.parse(settings.listen)
    uvicorn.run(
        Receiver(settings),
        host=address.host,
        port=address.port,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=_FINISH_S,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
