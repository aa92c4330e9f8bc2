"""Deliveries by webhook: a subscription whose copies are posted to a URL, as CloudEvents, signed as Standard Webhooks are.

2xx acknowledges. A target that is away or busy (no connection, 429, 502, 503, 504) gets its copies again, uncounted; after
`Retry-After` if it says so. Every other answer, and none in time, is a failed attempt. A batch that fails is posted again
one by one, so that a message that nobody can handle costs no other message a retry.

One thread with an event loop posts them all. Each destination has a few requests open at once.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
import msgspec
import uvloop

from tmc_common.eventlog import EventLog
from tmc_common.headers import context_of
from tmc_common.limited import UNCOMPRESSED, read_body_async
from tmc_server.delivery.spans import PublishSpans
from tmc_server.delivery.window import ALERT_AFTER, Destination, Window
from tmc_server.domain.catalog import Catalog, Forward
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.egress import Egress
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.checks import Endpoint
from tmc_server.domain.ports.delivery import Copy, ForwardAnswers
from tmc_server.errors import ForwardRefused
from tmc_server.metrics import METRICS
from tmc_server.outgoing import ENDPOINT, NotPermitted, PinnedTransport, permitted

log = EventLog("tmc.webhook")

ONE, MANY = "webhook", "webhook-batch"
"""Kinds of forwards: a request for each message, or for up to a hundred."""

_DEADLINE_S = 15.0  # for an answer
_CONNECT_S = 5.0
_REQUESTS = 8  # open at once, of a destination
_BATCH, _BATCH_BYTES = 100, 1 << 20
_WINDOW, _WINDOW_BYTES = 2_000, 64 << 20
_RESOLVED_S = 5.0
_SAID_BYTES = 4_096  # of an answer
_SAID_CHARACTERS = 200
_LONGEST_WAIT_S = 3_600.0
_STOP_S = 10.0
_AWAY = (429, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class _Taken:
    """2xx."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """The handler failed."""

    why: str


@dataclass(frozen=True, slots=True)
class _Away:
    """The target is away or busy. after_s: when it wants to be asked again; 0: it does not say."""

    why: str
    after_s: float = 0.0


_Outcome = _Taken | _Failed | _Away


@dataclass(eq=False, slots=True, kw_only=True)
class _Line:
    """What waits for one destination. On the loop only."""

    subscription: SubscriptionNumber
    destination: Destination
    waiting: deque[Copy] = field(default_factory=deque)
    workers: int = 0
    resolved: tuple[str, Sequence[Endpoint], float] = ("", (), 0.0)  # target, where it leads, when that was looked up


class WebhookForwarder:
    """domain.ports.delivery.Outlet, for both kinds. allow: where targets may be.  tls: for https."""

    def __init__(
        self,
        catalog: CatalogSource,
        answers: ForwardAnswers,
        wake: Callable[[], None],
        allow: Egress,
        tls: ssl.SSLContext,
    ) -> None:
        self._catalog = catalog
        self._answers = answers
        self._allow = allow
        self._spans = PublishSpans(catalog)
        self._window = Window(_WINDOW, _WINDOW_BYTES, wake)
        self._lines: dict[SubscriptionNumber, _Line] = {}
        self._loop = uvloop.new_event_loop()
        self._transport = PinnedTransport(tls)  # used by that loop alone
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tmc-webhooks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Give back what was not posted yet, and wait for what was. Returns: whether all was answered."""
        self._stopping.set()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._give_waiting_back)
            clean = self._window.drained(_STOP_S)
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_STOP_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_S)
        else:
            clean = True
        self._loop.close()
        return clean

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()
        await self._transport.aclose()

    def _give_waiting_back(self) -> None:
        for line in self._lines.values():
            copies = list(line.waiting)
            line.waiting.clear()
            self._give_back(line, copies, after_s=0.0)

    def examine(self, forward: Forward) -> None:
        """See domain.ports.delivery.Forwarding."""
        try:
            self._endpoints(forward.target)
        except NotPermitted as exc:
            raise ForwardRefused(f"{exc}") from exc
        except (OSError, UnicodeError) as exc:
            raise ForwardRefused(f"The host of {forward.target} has no address: {exc}.") from exc

    def reserve(self, subscription: SubscriptionNumber, wanted: int) -> int:
        if self._stopping.is_set():
            return 0
        return self._window.reserve(self._line(subscription).destination, wanted)

    def release(self, subscription: SubscriptionNumber, count: int) -> None:
        self._window.release(self._line(subscription).destination, count)

    def deliver(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self._line(copy.subscription).destination.unconfirmed.add((copy.shard, copy.number))
        self._window.add_bytes(sum(len(copy.body) for copy in copies))
        METRICS.published.inc(len(copies))
        self._loop.call_soon_threadsafe(self._take, copies)

    def drained_until(self, subscription: SubscriptionNumber, tried_ms: int) -> None:
        """Do nothing: the center's consumers do not read from a webhook."""

    def look(self, subscription: SubscriptionNumber) -> QueueLook | None:
        return QueueLook(consumers=1, unwritten=frozenset(self._line(subscription).destination.unconfirmed))

    def _line(self, subscription: SubscriptionNumber) -> _Line:
        found = self._lines.get(subscription)
        if found is None:
            destination = Destination(f"webhook of subscription {subscription}")
            fresh = _Line(subscription=subscription, destination=destination)
            found = self._lines.setdefault(subscription, fresh)
        return found

    # -- on the loop ------------------------------------------------------------------------------------------------

    def _take(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            line = self._line(copy.subscription)
            line.waiting.append(copy)
            if line.workers < _REQUESTS:
                line.workers += 1
                task = self._loop.create_task(self._work(line))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if self._stopping.is_set():
            self._give_waiting_back()

    async def _work(self, line: _Line) -> None:
        try:
            while line.waiting:
                forward = self._catalog.current.subscriptions[line.waiting[0].subscription].forward
                assert forward is not None
                await self._post(line, forward, _next(line.waiting, _BATCH if forward.kind == MANY else 1))
        finally:
            line.workers -= 1

    async def _post(self, line: _Line, forward: Forward, copies: Sequence[Copy]) -> _Outcome:
        began = time.monotonic()
        outcome = await self._outcome(line, forward, copies)
        error = "" if isinstance(outcome, _Taken) else outcome.why
        self._spans.published(copies, time.monotonic() - began, forward.kind, error)
        if isinstance(outcome, _Taken):
            self._forget(line, copies)
            self._window.succeeded(line.destination)
            self._answers.acknowledge(copies)
        elif isinstance(outcome, _Away):
            self._rest(line, copies, outcome)
        elif len(copies) > 1:
            await self._post_each(line, forward, copies)
        else:
            METRICS.returned.inc()
            self._forget(line, copies)
            self._answers.refuse(copies, f"webhook: {outcome.why}")
        return outcome

    async def _post_each(self, line: _Line, forward: Forward, copies: Sequence[Copy]) -> None:
        for number, copy in enumerate(copies, 1):
            outcome = await self._post(line, forward, [copy])
            if isinstance(outcome, _Away):
                self._rest(line, copies[number:], outcome)
                return

    async def _outcome(self, line: _Line, forward: Forward, copies: Sequence[Copy]) -> _Outcome:
        try:
            endpoint = await self._endpoint(line, forward.target)
            request = _request(forward, endpoint, copies, self._catalog.current)
            async with asyncio.timeout(_DEADLINE_S):
                response = await self._transport.handle_async_request(request)
                async with aclosing(response):
                    return await _meaning(response)
        except TimeoutError:
            return _Failed(f"no answer within {_DEADLINE_S:g} s")
        except NotPermitted as exc:
            return _Away(f"{exc}")
        except (httpx.ConnectError, httpx.ConnectTimeout, OSError, UnicodeError) as exc:
            return _Away(f"it cannot be reached: {exc}")
        except (httpx.HTTPError, ValueError) as exc:
            return _Failed(f"{type(exc).__name__}: {exc}")

    async def _endpoint(self, line: _Line, target: str) -> Endpoint:
        """Return what to connect to; each address in its turn. Raises NotPermitted, OSError."""
        known, endpoints, at = line.resolved
        if known != target or time.monotonic() - at > _RESOLVED_S:
            endpoints, at = await asyncio.to_thread(self._endpoints, target), time.monotonic()
        line.resolved = target, [*endpoints[1:], endpoints[0]], at
        return endpoints[0]

    def _endpoints(self, target: str) -> Sequence[Endpoint]:
        """Raises NotPermitted, OSError. Blocks."""
        return permitted(self._allow, _place(target), "[webhooks] allow")

    def _rest(self, line: _Line, copies: Sequence[Copy], outcome: _Away) -> None:
        """Give these back, and what waits behind them."""
        failure = self._window.failed(line.destination)
        copies = [*copies, *line.waiting]
        line.waiting.clear()
        self._give_back(line, copies, after_s=max(failure.pause_s, outcome.after_s))
        METRICS.given_back.labels("connection lost").inc(len(copies))
        if failure.begins_a_pause:
            log.warning("webhook_away", "%s takes no messages for now: %s", line.destination.name, outcome.why)
            if failure.pauses >= ALERT_AFTER:
                self._answers.complain(line.subscription, f"webhook: {outcome.why}")

    def _give_back(self, line: _Line, copies: Sequence[Copy], after_s: float) -> None:
        self._forget(line, copies)
        self._answers.give_back(copies, after_ms=round(after_s * 1000))

    def _forget(self, line: _Line, copies: Sequence[Copy]) -> None:
        line.destination.unconfirmed.difference_update([(copy.shard, copy.number) for copy in copies])
        self._window.add_bytes(-sum(len(copy.body) for copy in copies))
        self._window.release(line.destination, len(copies))


def _next(waiting: deque[Copy], most: int) -> list[Copy]:
    """Take up to `most`, and no more bytes than a batch may have, but for a single one."""
    taken = [waiting.popleft()]
    size = len(taken[0].body)
    while waiting and len(taken) < most and size + len(waiting[0].body) <= _BATCH_BYTES:
        taken.append(waiting.popleft())
        size += len(taken[-1].body)
    return taken


def _place(target: str) -> str:
    """host:port of a URL. Raises NotPermitted: it is none, or has what does not belong there."""
    try:
        url = httpx.URL(target)
    except httpx.InvalidURL as exc:
        raise NotPermitted(f"{target!r} is no URL: {exc}.") from exc
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.fragment:
        raise NotPermitted(f"{target!r} must be http:// or https://, a host, and a path, without user or fragment.")
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{host}:{url.port or (443 if url.scheme == 'https' else 80)}"


def _request(forward: Forward, endpoint: Endpoint, copies: Sequence[Copy], catalog: Catalog) -> httpx.Request:
    events = [_event(copy, catalog) for copy in copies]
    is_batch = forward.kind == MANY
    body = msgspec.json.encode(events if is_batch else events[0])
    headers = {
        "Host": httpx.URL(forward.target).netloc.decode(),
        "Content-Type": f"application/cloudevents{'-batch' if is_batch else ''}+json",
        "User-Agent": "transaction-message-center",
        **UNCOMPRESSED,
        **({} if is_batch else context_of(copies[0].headers)),
    }
    keys = catalog.subscriptions[copies[0].subscription].keys
    if keys is not None:
        headers |= signature(keys.signing, uuid.uuid4().hex if is_batch else str(events[0]["id"]), body)
    return httpx.Request(
        "POST",
        forward.target,
        headers=[(name.encode(), text.encode()) for name, text in headers.items()],
        content=body,
        extensions={ENDPOINT: endpoint, "timeout": {"connect": _CONNECT_S}},
    )


def signature(secret: bytes, webhook_id: str, body: bytes, now_s: int | None = None) -> Mapping[str, str]:
    """Return the headers of Standard Webhooks. now_s: since the epoch."""
    at = str(int(time.time()) if now_s is None else now_s)
    mac = hmac.digest(secret, f"{webhook_id}.{at}.".encode() + body, hashlib.sha256)
    return {
        "Webhook-Id": webhook_id,
        "Webhook-Timestamp": at,
        "Webhook-Signature": f"v1,{base64.b64encode(mac).decode()}",
    }


def _event(copy: Copy, catalog: Catalog) -> dict[str, object]:
    """Return the copy as a CloudEvent in its JSON form."""
    subscription = catalog.subscriptions[copy.subscription]
    event: dict[str, object] = {
        "specversion": "1.0",
        "id": str(MessageId(copy.topic, copy.producer, copy.shard, copy.number)),
        "source": f"/tmc/{catalog.apps[copy.producer].id}",
        "type": catalog.topics[copy.topic].name,
        "subject": copy.key,
        "datacontenttype": copy.content_type,
        "tmcattempt": int(copy.attempt),
        "tmcsubscriber": f"{catalog.apps[subscription.app].id}.{subscription.tag}",
    }
    if copy.headers:
        event["tmcheaders"] = json.dumps(dict(copy.headers), ensure_ascii=False)
    data = _json_data(copy)
    return event | ({"data": data} if data is not None else {"data_base64": copy.body})


def _json_data(copy: Copy) -> msgspec.Raw | None:
    """The body as it is, if it is what its content type says. None: it is no JSON."""
    kind = copy.content_type.partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            msgspec.json.decode(copy.body)
            return msgspec.Raw(copy.body)
    return None


async def _meaning(response: httpx.Response) -> _Outcome:
    status = response.status_code
    said = b""
    with suppress(ValueError, httpx.HTTPError):  # what it says besides is only for people
        said = await read_body_async(response, _SAID_BYTES)
    if 200 <= status < 300:
        return _Taken()
    text = said.decode(errors="replace").strip()[:_SAID_CHARACTERS]
    why = (
        f"status {status}{' (redirects are not followed)' if 300 <= status < 400 else ''}{f': {text}' if text else ''}"
    )
    if status in _AWAY:
        return _Away(why, _retry_after_s(response.headers.get("retry-after", "")))
    return _Failed(why)


def _retry_after_s(text: str) -> float:
    """Seconds, or a date. 0: neither."""
    seconds = 0.0
    if text.isascii() and text.isdigit():
        seconds = float(text)
    else:
        with suppress(ValueError, TypeError):
            seconds = (parsedate_to_datetime(text).astimezone(UTC) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), _LONGEST_WAIT_S)
