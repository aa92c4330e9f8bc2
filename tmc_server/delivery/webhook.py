"""Deliveries by webhook: a subscription whose copies are posted to a URL, as CloudEvents, signed as Standard Webhooks are.

2xx acknowledges. A target that is away or busy (no connection, 429, 502, 503, 504) gets its copies again, uncounted; after
`Retry-After` if it says so. Every other answer, and none in time, is a failed attempt. A batch that fails is posted again
one by one, so that a message that nobody can handle costs no other message a retry; after one that hangs, the rest come later.

One thread with an event loop posts them all. Each destination has a few requests open at once, and little that waits for them:
the rest waits in the database, so that a target that hangs delays only its own messages.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
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
from functools import partial

import httpx
import msgspec
import uvloop

from tmc_common.eventlog import EventLog
from tmc_common.headers import context_of
from tmc_common.limited import UNCOMPRESSED, read_body_async
from tmc_common.mismatch import spoken_instead
from tmc_server.delivery.cloud_events import json_event
from tmc_server.delivery.spans import PublishSpans
from tmc_server.delivery.window import ALERT_AFTER, Destination, Window
from tmc_server.domain.catalog import WEBHOOK, WEBHOOK_BATCH, Catalog, DeliveryKeys, Forward
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.egress import Egress
from tmc_server.domain.numbers import Attempt, MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.checks import Endpoint
from tmc_server.domain.ports.delivery import Copy, ForwardAnswers
from tmc_server.errors import ForwardRefused
from tmc_server.metrics import METRICS
from tmc_server.outgoing import ENDPOINT, NotPermitted, PinnedTransport, permitted

log = EventLog("tmc.webhook")

_DEADLINE_S = 15.0  # for the status of an answer
_CONNECT_S = 5.0  # also for the look-up of its name
_BATCH, _BATCH_BYTES = 100, 1 << 20
_LINE = {WEBHOOK: 64, WEBHOOK_BATCH: 8 * _BATCH}  # copies that are reserved for a destination
_LINE_BYTES = 8 << 20  # of their bodies, about
_REQUESTS = {WEBHOOK: 8, WEBHOOK_BATCH: 4}  # open at once, of a destination
_WINDOW, _WINDOW_BYTES = 100_000, 256 << 20
_RESOLVED_S = 5.0
_EXCERPT_S, _EXCERPT_BYTES, _EXCERPT_CHARACTERS = 1.0, 4_096, 200  # of the body of an answer
_LONGEST_WAIT_S = 600.0  # that a target may ask for
_STOP_S = 10.0
_AWAY = (429, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class _Taken:
    """2xx."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """The handler failed. hung: it did not answer in time."""

    why: str
    hung: bool = False


@dataclass(frozen=True, slots=True)
class _Away:
    """The target is away or busy. after_s: when it wants to be asked again; 0: it does not say."""

    why: str
    after_s: float = 0.0


_Outcome = _Taken | _Failed | _Away


@dataclass(eq=False, slots=True, kw_only=True)
class _Line:
    """Copies that wait for one destination. Changed on the loop only.

    open, bytes: names of the copies that wait or are being posted, and the bytes of their bodies. `unconfirmed` knows only
    messages, and the next copy of one may be here already.
    resolved: a target, where it leads, since when.
    looking: the look-up that is under way, and of which target.
    singly: how many are posted one by one, because a batch may have killed its handler.
    """

    subscription: SubscriptionNumber
    destination: Destination
    waiting: deque[Copy] = field(default_factory=deque)
    bytes: int = 0
    open: set[tuple[Shard, MessageNumber, Attempt]] = field(default_factory=set)
    workers: int = 0
    resolved: tuple[str, Sequence[Endpoint], float] = ("", (), 0.0)
    looking: tuple[str, asyncio.Future[Sequence[Endpoint]]] | None = None
    singly: int = 0


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
        if not self._thread.is_alive():
            self._loop.close()
            return True
        self._loop.call_soon_threadsafe(self._give_all_waiting_back)
        clean = self._window.drained(_STOP_S)
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return clean

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._transport.aclose()

    def _give_all_waiting_back(self) -> None:
        for line in self._lines.values():
            self._give_waiting_back(line)

    def _give_waiting_back(self, line: _Line) -> None:
        copies = list(line.waiting)
        line.waiting.clear()
        self._give_back(line, copies, after_s=0.0)

    def examine(self, forward: Forward) -> None:
        """See domain.ports.delivery.Forwarding. Any answer of HTTP will do."""
        try:
            endpoint = self._endpoints(forward.target)[0]
            asyncio.run_coroutine_threadsafe(self._ask(forward, endpoint), self._loop).result(2 * _CONNECT_S)
        except NotPermitted as exc:
            raise ForwardRefused(f"{exc}") from exc
        except (httpx.HTTPError, OSError, UnicodeError) as exc:
            raise ForwardRefused(
                f"{forward.target} cannot be reached ({_said(exc)}): start it, correct the address, or say --untried."
            ) from exc

    async def _ask(self, forward: Forward, endpoint: Endpoint) -> None:
        request = httpx.Request(
            "HEAD",
            forward.target,
            headers={"Host": httpx.URL(forward.target).netloc.decode()},
            extensions={ENDPOINT: endpoint, "timeout": {"connect": _CONNECT_S}},
        )
        async with asyncio.timeout(_CONNECT_S), aclosing(await self._transport.handle_async_request(request)):
            pass

    def reserve(self, subscription: SubscriptionNumber, wanted: int) -> int:
        if self._stopping.is_set():
            return 0
        line = self._line(subscription)
        most = _LINE[self._forward(line).kind] if line.bytes < _LINE_BYTES else 0
        return self._window.reserve(line.destination, wanted, most)

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
        destination = self._line(subscription).destination
        if self._window.rests(destination):
            return None
        return QueueLook(consumers=1, unwritten=frozenset(destination.unconfirmed))

    def _line(self, subscription: SubscriptionNumber) -> _Line:
        found = self._lines.get(subscription)
        if found is None:
            destination = Destination(f"webhook of subscription {subscription}")
            fresh = _Line(subscription=subscription, destination=destination)
            found = self._lines.setdefault(subscription, fresh)
        return found

    def _forward(self, line: _Line) -> Forward:
        forward = self._catalog.current.subscriptions[line.subscription].forward
        assert forward is not None, "the catalog never takes a forward back"
        return forward

    # -- on the loop ------------------------------------------------------------------------------------------------

    def _take(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            line = self._line(copy.subscription)
            line.waiting.append(copy)
            line.open.add(_name(copy))
            line.bytes += len(copy.body)
            if line.workers < _REQUESTS[self._forward(line).kind]:
                line.workers += 1
                task = self._loop.create_task(self._work(line))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if self._stopping.is_set():
            self._give_all_waiting_back()

    async def _work(self, line: _Line) -> None:
        try:
            while line.waiting:
                if self._catalog.current.is_paused(line.subscription) or self._window.rests(line.destination):
                    self._give_waiting_back(line)
                    return
                forward = self._forward(line)
                copies = _next(line.waiting, _BATCH if forward.kind == WEBHOOK_BATCH and not line.singly else 1)
                try:
                    await self._post(line, forward, copies)
                except Exception:  # a fault of ours: no copy may be left without an answer
                    log.exception("webhook_failed", "a fault while posting to %s", line.destination.name)
                    self._rest(line, self._unsettled(line, copies), _Away("a fault of the center"))
        finally:
            line.workers -= 1

    async def _post(self, line: _Line, forward: Forward, copies: Sequence[Copy]) -> _Outcome:
        began = time.monotonic()
        outcome = await self._outcome(line, forward, copies)
        error = "" if isinstance(outcome, _Taken) else outcome.why
        self._spans.published(copies, time.monotonic() - began, forward.kind, error)
        if not isinstance(outcome, _Away):
            line.singly = max(0, line.singly - len(copies))
        if isinstance(outcome, _Taken):
            self._answers.acknowledge(copies)
            self._forget(line, copies)
            self._window.succeeded(line.destination)
        elif isinstance(outcome, _Away):
            self._rest(line, copies, outcome)
        elif len(copies) > 1:
            await self._post_each(line, forward, copies)
        else:
            METRICS.returned.inc()
            self._answers.refuse(copies, f"webhook: {outcome.why}")
            self._forget(line, copies)
        return outcome

    async def _post_each(self, line: _Line, forward: Forward, copies: Sequence[Copy]) -> None:
        for copy in copies:
            outcome = await self._post(line, forward, [copy])
            hung = isinstance(outcome, _Failed) and outcome.hung
            if isinstance(outcome, _Away):
                line.singly = len(copies)
            if hung or isinstance(outcome, _Away) or self._stopping.is_set():
                break
        self._give_back(line, self._unsettled(line, copies), after_s=1.0)

    async def _outcome(self, line: _Line, forward: Forward, copies: Sequence[Copy]) -> _Outcome:
        try:
            endpoint = await self._endpoint(line, forward.target)
            request = _request(forward, endpoint, copies, self._catalog.current)
            async with asyncio.timeout(_DEADLINE_S):
                response = await self._transport.handle_async_request(request)
            async with aclosing(response):
                return await _meaning(response)
        except TimeoutError:
            return _Failed(f"no answer within {_DEADLINE_S:g} s", hung=True)
        except NotPermitted as exc:
            return _Away(f"{exc}")
        except (httpx.ConnectError, httpx.ConnectTimeout, OSError, UnicodeError) as exc:
            return _Away(f"it cannot be reached: {_said(exc)}")
        except (httpx.HTTPError, ValueError) as exc:
            return _Failed(f"{type(exc).__name__}: {exc}")

    async def _endpoint(self, line: _Line, target: str) -> Endpoint:
        """Return what to connect to; each address in its turn. Raises NotPermitted, OSError."""
        known, endpoints, at = line.resolved
        if known != target or time.monotonic() - at > _RESOLVED_S:
            if line.looking is None or line.looking[0] != target:
                line.looking = target, self._looked_up(target)
            looking = line.looking
            if not (await asyncio.wait([looking[1]], timeout=_CONNECT_S))[0]:
                raise OSError(f"its name was not resolved within {_CONNECT_S:g} s")
            if line.looking is looking:
                line.looking = None
            endpoints, at = looking[1].result(), time.monotonic()
        line.resolved = target, [*endpoints[1:], endpoints[0]], at
        return endpoints[0]

    def _looked_up(self, target: str) -> asyncio.Future[Sequence[Endpoint]]:
        """Look up in a thread that nobody has to wait for: resolvers may take minutes."""
        found: asyncio.Future[Sequence[Endpoint]] = self._loop.create_future()
        found.add_done_callback(asyncio.Future.exception)  # nobody may be left who waits

        def look_up() -> None:
            try:
                settle = partial(found.set_result, self._endpoints(target))
            except Exception as exc:  # noqa: BLE001 - for the one who waits
                settle = partial(found.set_exception, exc)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(settle)

        threading.Thread(target=look_up, name="tmc-webhook-name", daemon=True).start()
        return found

    def _endpoints(self, target: str) -> Sequence[Endpoint]:
        """Raises NotPermitted, OSError. Blocks."""
        return permitted(self._allow, _place(target), "[webhooks] allow")

    def _rest(self, line: _Line, copies: Sequence[Copy], outcome: _Away) -> None:
        """Give these back, and begin a pause: what waits behind them goes back, too, see `_work`."""
        failure = self._window.failed(line.destination, outcome.after_s)
        self._give_back(line, copies, failure.pause_s)
        if failure.begins_a_pause:
            log.warning("webhook_away", "%s takes no messages for now: %s", line.destination.name, outcome.why)
            if failure.pauses >= ALERT_AFTER:
                self._answers.complain(line.subscription, f"webhook: {outcome.why}")

    def _unsettled(self, line: _Line, copies: Sequence[Copy]) -> Sequence[Copy]:
        """Return those that are not answered; others of the same messages may have come meanwhile."""
        return [copy for copy in copies if _name(copy) in line.open]

    def _give_back(self, line: _Line, copies: Sequence[Copy], after_s: float) -> None:
        if copies:
            METRICS.given_back.labels("connection lost").inc(len(copies))
            self._answers.give_back(copies, after_ms=round(after_s * 1000))
            self._forget(line, copies)

    def _forget(self, line: _Line, copies: Sequence[Copy]) -> None:
        """Let go of copies that are answered: until the answer is stored, `answers` knows them."""
        line.open.difference_update(map(_name, copies))
        line.destination.unconfirmed.difference_update([(copy.shard, copy.number) for copy in copies])
        size = sum(len(copy.body) for copy in copies)
        line.bytes -= size
        self._window.add_bytes(-size)
        self._window.release(line.destination, len(copies))


def _said(exc: Exception) -> str:
    instead = spoken_instead(f"{exc}")
    return f"it speaks {instead}" if instead else f"{exc}" or "no answer in time"


def _name(copy: Copy) -> tuple[Shard, MessageNumber, Attempt]:
    return copy.shard, copy.number, copy.attempt


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
    events = [json_event(copy, catalog) for copy in copies]
    is_batch = forward.kind == WEBHOOK_BATCH
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
        headers |= signatures(keys, uuid.uuid4().hex if is_batch else str(events[0]["id"]), body)
    return httpx.Request(
        "POST",
        forward.target,
        headers=[(name.encode(), text.encode()) for name, text in headers.items()],
        content=body,
        extensions={ENDPOINT: endpoint, "timeout": {"connect": _CONNECT_S}},
    )


def signatures(keys: DeliveryKeys, webhook_id: str, body: bytes, now_s: int | None = None) -> Mapping[str, str]:
    """Return the headers of Standard Webhooks, with a signature by each key that is valid. now_s: since the epoch."""
    at = str(int(time.time()) if now_s is None else now_s)
    content = f"{webhook_id}.{at}.".encode() + body
    valid = [key for key in (keys.signing, keys.other) if key is not None]
    signed = [base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode() for key in valid]
    return {
        "Webhook-Id": webhook_id,
        "Webhook-Timestamp": at,
        "Webhook-Signature": " ".join(f"v1,{each}" for each in signed),
    }


async def _meaning(response: httpx.Response) -> _Outcome:
    """The status decides. What the body says is only for people, and may take no time."""
    status = response.status_code
    body = b""
    with suppress(TimeoutError, ValueError, httpx.HTTPError):
        async with asyncio.timeout(_EXCERPT_S):
            body = await read_body_async(response, _EXCERPT_BYTES)
    if 200 <= status < 300:
        return _Taken()
    excerpt = body.decode(errors="replace").strip()[:_EXCERPT_CHARACTERS]
    hint = " (redirects are not followed)" if 300 <= status < 400 else ""
    why = f"status {status}{hint}{f': {excerpt}' if excerpt else ''}"
    if status in _AWAY:
        return _Away(why, _retry_after_s(response.headers.get("retry-after", "")))
    return _Failed(why)


def _retry_after_s(text: str) -> float:
    """Return seconds until then. text: a number of them, or a date; 0: it is neither."""
    seconds = 0.0
    if text.isascii() and text.isdigit():
        seconds = float(text)
    else:
        with suppress(ValueError, TypeError, OverflowError):
            seconds = (parsedate_to_datetime(text).astimezone(UTC) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), _LONGEST_WAIT_S)
