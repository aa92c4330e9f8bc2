"""Spans of OpenTelemetry, through its API only: unless the program uses OpenTelemetry, nothing here has an effect.

Context travels as text under the names of the propagators that the program has configured: W3C's `traceparent`,
`tracestate` and `baggage` by default. Names and attributes of spans follow the semantic conventions for messaging and RPC.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from tmc_common.eventlog import EventLog

log = EventLog("tmc.tracing")

_TRACER = "tmc"
_METADATA_BYTES = 2_048  # gRPC refuses more than 8 KiB of all metadata
_is_said = False


def is_on() -> bool:
    """Return whether this program uses OpenTelemetry."""
    return "opentelemetry.trace" in sys.modules


def carried() -> dict[str, str]:
    """The current context, as headers."""
    return _injected(None) if is_on() else {}


def metadata() -> tuple[tuple[str, str], ...]:
    """The current context for a call of gRPC or HTTP, as much of it as servers accept beside other metadata."""
    found: list[tuple[str, str]] = []
    room = _METADATA_BYTES
    for name, text in carried().items():
        size = len(name) + len(text)
        if text.isascii() and text.isprintable() and size <= room:
            found.append((name.lower(), text))
            room -= size
    return tuple(found)


@contextmanager
def within(headers: Mapping[str, str]) -> Iterator[None]:
    """Continue the trace that the headers carry, unless a span is current already."""
    if not is_on():
        yield
        return
    from opentelemetry import context, trace

    if trace.get_current_span().get_span_context().is_valid:
        yield
        return
    token = context.attach(_extracted(headers))
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def span(
    name: str,
    kind: str,
    attributes: Mapping[str, Any],
    *,
    parent: Mapping[str, str] | None = None,
    links: Sequence[Mapping[str, str]] = (),
) -> Iterator[Any]:
    """Make a span current; an exception marks it as failed. Yields: the span; None: there is no OpenTelemetry.

    kind: name of a SpanKind.  parent: headers whose trace it continues; None: the current one.
    """
    if not is_on():
        yield None
        return
    from opentelemetry import context, trace

    made = begin(name, kind, attributes, parent=parent, links=links)
    token = context.attach(context.get_current() if parent is None else _extracted(parent))  # its baggage, too
    try:
        with trace.use_span(made if made is not None else trace.INVALID_SPAN):
            yield made
    finally:
        context.detach(token)
        end(made)


def begin(
    name: str,
    kind: str,
    attributes: Mapping[str, Any],
    *,
    parent: Mapping[str, str] | None = None,
    links: Sequence[Mapping[str, str]] = (),
    lasted_s: float = 0.0,
) -> Any:
    """A span that is not made current. Call only if `is_on`.  lasted_s: how long ago it began.  None: it cannot be made."""
    from opentelemetry import trace

    with _shield():
        linked = [trace.get_current_span(_extracted(each)).get_span_context() for each in links]
        return trace.get_tracer(_TRACER).start_span(
            name,
            context=None if parent is None else _extracted(parent),
            kind=trace.SpanKind[kind],
            attributes=attributes,
            links=[trace.Link(each) for each in linked if each.is_valid],
            start_time=time.time_ns() - round(lasted_s * 1e9),
        )
    return None


def headers_of(span: Any) -> dict[str, str]:
    """The context with this span as the current one, as headers."""
    from opentelemetry import trace

    return _injected(trace.set_span_in_context(span)) if span is not None else {}


def note(span: Any, name: str, value: str | int) -> None:
    """Add an attribute. span None: it could not be made."""
    if span is not None:
        span.set_attribute(name, value)


def end(span: Any, error: str = "") -> None:
    """error: why what it stands for failed.  span None: it could not be made."""
    if span is None:
        return
    from opentelemetry.trace import Status, StatusCode

    with _shield():
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()


def _injected(context: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    with _shield():  # loading the configured propagators may fail, too
        from opentelemetry import propagate

        propagate.inject(found, context)
    return found


def _extracted(headers: Mapping[str, str]) -> Any:
    from opentelemetry import context

    with _shield():
        from opentelemetry import propagate

        return propagate.extract(_AnyCase({name.lower(): text for name, text in headers.items()}), context.Context())
    return context.Context()


class _AnyCase(dict[str, str]):
    """Names of headers, whatever their case: propagators differ, and metadata of gRPC is in lower case."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key.lower(), default)


@contextmanager
def _shield() -> Iterator[None]:
    """A fault of telemetry, whatever a program has plugged in, costs spans and no messages; the log says so once."""
    global _is_said
    try:
        yield
    except Exception:
        if not _is_said:
            _is_said = True
            log.exception("tracing_failed", "OpenTelemetry failed, and spans are missing")


def messaging(
    operation: str, kind: str, topic: str = "", message_id: str = "", more: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Attributes. operation: as we call it.  kind: create, send, receive, process or settle."""
    found = {
        "messaging.system": "tmc",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": topic,
        "messaging.message.id": message_id,
        **more,
    }
    return {name: value for name, value in found.items() if value != ""}
