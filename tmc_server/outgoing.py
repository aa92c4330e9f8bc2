"""Custom httpx transports for the center's HTTP calls to external services.

Both pass httpx requests to httpcore over network backends of our own:

- `PinnedTransport` (asyncio) connects to the address and port that passed the egress check, even if the URL's host
  resolves elsewhere by then; Host, SNI and certificate verification still use the host name.
- `TimedTransport` (blocking) gives every connect, handshake, write and read only what is left of one deadline, so that a
  server that sends a byte a second cannot hold its caller.

They are called without httpx clients, which would add redirects, proxies and credentials from the environment,
cookies, decompression and a log line with the full URL, and cost as much as the call itself.
"""

from __future__ import annotations

import asyncio
import ipaddress
import select
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpcore
import httpx

from tmc_server.domain.egress import Address, Egress, Place, parse_place
from tmc_server.domain.ports.checks import Endpoint

ENDPOINT = "tmc_endpoint"
"""Key of a request's extensions: the Endpoint to connect to."""
TARGET = "target"
"""Key of a request's extensions, httpcore's own: path and query in bytes, sent as they are instead of the URL's."""

_MOST_BYTES = 8 << 20
"""Limit on one response as read from the socket: headers, framing and body. Bodies have smaller limits of their own;
this one stops responses that never reach a body, such as endless 103s."""
_UNUSED_S = 60.0
_IDLE_S = 15.0
_MOST_IDLE = 64
_MOST_SERVICES = 512
_HANG_UP_S = 0.2  # for a proxy to find out that nobody is behind it
_FOREIGN: tuple[tuple[type[Exception], type[httpx.TransportError]], ...] = (  # the first that fits
    (httpcore.ConnectTimeout, httpx.ConnectTimeout),
    (httpcore.TimeoutException, httpx.ReadTimeout),
    (httpcore.ConnectError, httpx.ConnectError),
    (httpcore.NetworkError, httpx.ReadError),
    (httpcore.RemoteProtocolError, httpx.RemoteProtocolError),
    (httpcore.LocalProtocolError, httpx.LocalProtocolError),
    (httpcore.ProtocolError, httpx.RemoteProtocolError),
    (httpcore.ConnectionNotAvailable, httpx.PoolTimeout),
)


@contextmanager
def _translated(request: httpx.Request) -> Iterator[None]:
    """httpcore's errors as httpx's."""
    try:
        yield
    except Exception as exc:
        for foreign, ours in _FOREIGN:
            if isinstance(exc, foreign):
                raise ours(str(exc) or type(exc).__name__, request=request) from exc
        raise


def _as_core(request: httpx.Request) -> httpcore.Request:
    return httpcore.Request(
        method=request.method,
        url=httpcore.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        ),
        headers=request.headers.raw,
        content=request.stream,
        extensions=request.extensions,
    )


# -- TLS ---------------------------------------------------------------------------------------------------------------


@cache
def _usual_tls() -> ssl.SSLContext:
    """Return a context with the authorities of the system.

    Reading them takes 20 ms, for each center of a process that tests a service.
    """
    return ssl.create_default_context()


def client_tls(authority: str | None, certificate: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """Return the context for calls with these PEM files; None: the authorities of the system, no certificate.

    Raises OSError, ssl.SSLError.
    """
    if not (authority or certificate):
        return _usual_tls()
    context = ssl.create_default_context(cafile=authority)
    if certificate:
        context.load_cert_chain(certificate, key)
    return context


# -- addresses -----------------------------------------------------------------------------------------------------------

Resolver = Callable[[str, int], Sequence[str]]
"""(name, port) -> addresses. Raises OSError."""


class NotPermitted(Exception):
    """A place that the center may not connect to, or that is none."""


def resolve(name: str, port: int) -> Sequence[str]:
    """Ask the system's resolver."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def permitted(
    egress: Egress, text: str, setting: str, *, listed: bool | None = None, resolver: Resolver = resolve
) -> Sequence[Endpoint]:
    """Return what host:port leads to, one endpoint or more. Blocks.

    setting: the name of the allow-list.  listed: whether the place counts as listed; None: if the list names it.
    Raises NotPermitted; OSError, UnicodeError: it has no address.
    """
    try:
        place = parse_place(text)
    except ValueError as exc:
        raise NotPermitted(f"{exc}.") from exc
    named = egress.lists(place) if listed is None else listed
    if not egress.may_resolve(place, listed=named):
        raise NotPermitted(f"{place}: {setting} does not list it.")
    found: Sequence[Address] = [place.literal] if place.literal is not None else _addresses(place, resolver)
    for address in found:  # one that leads elsewhere makes the name suspicious as a whole
        if not egress.permits(address, place.port, listed=named):
            raise NotPermitted(f"{place} leads to {address}: {setting} does not list it.")
    return [Endpoint(host=place.host, address=str(address), port=place.port) for address in found]


def _addresses(place: Place, resolver: Resolver) -> Sequence[Address]:
    return [ipaddress.ip_address(text.partition("%")[0]) for text in resolver(place.host, place.port)]


# -- asyncio, pinned ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Service:
    """idle: connections that answered and were kept, and since when.  used: when it was asked last.  Monotonic seconds."""

    idle: list[tuple[httpcore.AsyncHTTPConnection, float]]
    busy: int = 0
    used: float = 0.0


class PinnedTransport(httpx.AsyncBaseTransport):
    """Connects each request to its Endpoint; an idle connection verified for one host is never reused for another.

    Uses httpcore's connections without its pool, which scans every connection on every request. The caller limits how
    many are open at once; 64 idle ones are kept per service, for services used in the last minute, at most 512.

    tls: for https.  Not thread-safe: it belongs to one event loop.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._services: dict[tuple[Endpoint, bytes], _Service] = {}
        self._silent: dict[Endpoint, None] = {}  # whose last connection ended without an answer; the latest at the end

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        service = self._service(request)
        service.busy += 1
        try:
            await self._close_unused()
            with _translated(request):
                connection, response = await self._answered(service, request)
        except BaseException:
            service.busy -= 1
            raise
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_Body(response, request, service, connection),
            extensions=response.extensions,
        )

    async def _answered(
        self, service: _Service, request: httpx.Request
    ) -> tuple[httpcore.AsyncHTTPConnection, httpcore.Response]:
        """Send the request; if a reused connection fails meanwhile, send it once more on a new one."""
        asked, endpoint = _as_core(request), request.extensions[ENDPOINT]
        kept = await _kept(service)
        if kept is not None:
            with suppress(httpcore.NetworkError, httpcore.RemoteProtocolError, httpcore.ConnectionNotAvailable):
                response = await kept.handle_async_request(asked)
                self._silent.pop(endpoint, None)
                return kept, response
        elif endpoint in self._silent:
            await self._see_whether_it_hangs_up(endpoint, request.extensions.get("timeout", {}).get("connect"))
        connection = httpcore.AsyncHTTPConnection(
            asked.url.origin, ssl_context=self._tls, network_backend=_Pinned(endpoint)
        )
        try:
            response = await connection.handle_async_request(asked)
        except httpcore.ConnectError:
            raise
        except (httpcore.NetworkError, httpcore.RemoteProtocolError):
            self._silent.pop(endpoint, None)
            self._silent[endpoint] = None
            if len(self._silent) > _MOST_SERVICES:
                del self._silent[next(iter(self._silent))]
            raise
        self._silent.pop(endpoint, None)
        return connection, response

    async def _see_whether_it_hangs_up(self, endpoint: Endpoint, timeout: float | None) -> None:
        """Connect, and wait a moment. A proxy that has nobody behind it takes a connection and closes it: then no handler has
        begun, while a connection that ends after a request may be that of a handler that died.

        timeout: of the connection.  Raises httpcore.ConnectError: it closed the connection, or takes none; ConnectTimeout.
        """
        stream, said = await _Pinned(endpoint).connect_tcp("", 0, timeout), b"?"
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_HANG_UP_S):
                    said = await stream.read(1)
        except httpcore.ReadError:
            said = b""
        finally:
            await stream.aclose()
            if said:  # somebody holds the connection, perhaps for longer than the caller can wait
                self._silent.pop(endpoint, None)
        if not said:
            raise httpcore.ConnectError("it closes connections before anything is sent")

    def _service(self, request: httpx.Request) -> _Service:
        name = (request.extensions[ENDPOINT], request.url.raw_scheme)
        service = self._services.pop(name, None) or _Service([])
        service.used = time.monotonic()
        self._services[name] = service  # at the end: the first ones were used longest ago
        return service

    async def _close_unused(self) -> None:
        long_ago, surplus = time.monotonic() - _UNUSED_S, len(self._services) - _MOST_SERVICES
        oldest = next(iter(self._services.values()))
        if surplus <= 0 and oldest.used > long_ago:
            return
        resting = [(name, service) for name, service in self._services.items() if not service.busy]
        closing = [name for number, (name, of) in enumerate(resting) if number < surplus or of.used <= long_ago]
        for service in [self._services.pop(name) for name in closing]:
            await _close(service)

    async def aclose(self) -> None:
        services, self._services = self._services, {}
        for service in services.values():
            await _close(service)


async def _kept(service: _Service) -> httpcore.AsyncHTTPConnection | None:
    """The most recently used idle connection that is fresh, open and without unexpected data; close unfit ones."""
    while service.idle:
        connection, since = service.idle.pop()
        if time.monotonic() - since < _IDLE_S and not connection.has_expired():
            return connection
        await connection.aclose()
    return None


def _said_more(connection: httpcore.AsyncHTTPConnection) -> bool:
    """Return whether data arrived after the response: it would be taken for the next response.

    httpcore knows this, but has no public API for it.
    """
    trailing, _ = connection._connection._h11_state.trailing_data  # type: ignore[union-attr]
    return bool(trailing)


async def _close(service: _Service) -> None:
    while service.idle:
        await service.idle.pop()[0].aclose()


class _Body(httpx.AsyncByteStream):
    """A response body; read to the end, it returns its connection for reuse, otherwise httpcore has closed it."""

    def __init__(
        self,
        response: httpcore.Response,
        request: httpx.Request,
        service: _Service,
        connection: httpcore.AsyncHTTPConnection,
    ) -> None:
        self._response = response
        self._request = request
        self._service = service
        self._connection = connection
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _translated(self._request):
            async for part in self._response.aiter_stream():
                yield part

    async def aclose(self) -> None:
        try:
            await self._response.aclose()
        finally:
            if self._open:
                self._open = False
                self._service.busy -= 1
                room = len(self._service.idle) < _MOST_IDLE
                if room and self._connection.is_idle() and not _said_more(self._connection):
                    self._service.idle.append((self._connection, time.monotonic()))
                else:
                    await self._connection.aclose()


class _Pinned(httpcore.AsyncNetworkBackend):
    """Connects to one address and port, whatever the origin is called."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        async with _timely(timeout):
            with _refused(httpcore.ConnectError):
                reader, writer = await asyncio.open_connection(self._endpoint.address, self._endpoint.port)
        return _Stream(reader, writer)


@asynccontextmanager
async def _timely(timeout: float | None) -> AsyncIterator[None]:
    """Raises httpcore.ConnectTimeout: nothing was sent in that time. None: the caller enforces a deadline."""
    inner = asyncio.timeout(timeout)
    try:
        async with inner:
            yield
    except TimeoutError as exc:
        if not inner.expired():
            raise
        raise httpcore.ConnectTimeout(f"no connection within {timeout:g} s") from exc


class _Stream(httpcore.AsyncNetworkStream):
    """asyncio streams: the anyio streams that httpcore uses cost a fifth of a call. The caller enforces the deadline.

    Limits how much may be read after each write, so that no response is endless.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._read = 0
        self._arrived = select.poll()  # what the loop has not read yet
        self._arrived.register(writer.get_extra_info("socket"), select.POLLIN)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _refused(httpcore.ReadError):
            data = await self._reader.read(max_bytes)
        self._read += len(data)
        if self._read > _MOST_BYTES:
            raise httpcore.ReadError(f"more than {_MOST_BYTES} bytes")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._read = 0
        with _refused(httpcore.WriteError):
            self._writer.write(buffer)
            await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.transport.abort()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        async with _timely(timeout):
            with _refused(httpcore.ConnectError):
                await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        if self._unread:  # asyncio keeps what came in the clear, and would hand it out as the first answer
            await self.aclose()
            raise httpcore.ConnectError("it spoke before it was asked")
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            gone = self._writer.is_closing() or self._reader.at_eof()
            return gone or self._unread or bool(self._arrived.poll(0))
        return self._writer.get_extra_info(info)

    @property
    def _unread(self) -> bool:
        return bool(self._reader._buffer)  # type: ignore[attr-defined]  # at_eof alone is public


@contextmanager
def _refused(error: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as exc:  # RuntimeError: uvloop's, where the peer reset the connection before a write
        raise error(str(exc)) from exc


# -- blocking, timed ----------------------------------------------------------------------------------------------------


class TimedTransport(httpx.BaseTransport):
    """A new connection for each request, and one deadline of `seconds` for all of it. Thread-safe."""

    def __init__(self, seconds: float, tls: ssl.SSLContext) -> None:
        self._seconds = seconds
        self._tls = tls

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        pool = httpcore.ConnectionPool(
            ssl_context=self._tls, network_backend=_Timed(time.monotonic() + self._seconds), max_keepalive_connections=0
        )
        try:
            with _translated(request):
                response = pool.handle_request(_as_core(request))
        except BaseException:
            pool.close()
            raise
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_TimedBody(response, request, pool),
            extensions=response.extensions,
        )


class _TimedBody(httpx.SyncByteStream):
    def __init__(self, response: httpcore.Response, request: httpx.Request, pool: httpcore.ConnectionPool) -> None:
        self._response = response
        self._request = request
        self._pool = pool

    def __iter__(self) -> Iterator[bytes]:
        with _translated(self._request):
            yield from self._response.iter_stream()

    def close(self) -> None:
        self._response.close()
        self._pool.close()


class _Timed(httpcore.NetworkBackend):
    """until: monotonic seconds."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        left = _left(self._until, httpcore.ConnectTimeout)
        stream = self._backend.connect_tcp(host, port, left, local_address, socket_options)
        return _TimedStream(stream, self._until)


class _TimedStream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, until: float) -> None:
        self._stream = stream
        self._until = until

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._until, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._until, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = _left(self._until, httpcore.ConnectTimeout)
        return _TimedStream(self._stream.start_tls(ssl_context, server_hostname, left), self._until)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(until: float, over: type[httpcore.TimeoutException]) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise over("the deadline is over")
    return left
