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

_TRACER = "tmc"


def is_on() -> bool:
    """Does this program use OpenTelemetry?"""
    return "opentelemetry.trace" in sys.modules


def carried() -> dict[str, str]:
    """The current context, as headers."""
    if not is_on():
        return {}
    from opentelemetry import propagate

    found: dict[str, str] = {}
    propagate.inject(found)
    return found


@contextmanager
def within(headers: Mapping[str, str]) -> Iterator[None]:
    """Continue the trace that the headers carry, unless a span is current already."""
    if not is_on():
        yield
        return
    from opentelemetry import context, propagate, trace

    if trace.get_current_span().get_span_context().is_valid:
        yield
        return
    token = context.attach(propagate.extract(headers))
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
    from opentelemetry import context, propagate, trace

    made = begin(name, kind, attributes, parent=parent, links=links)
    token = context.attach(context.get_current() if parent is None else propagate.extract(parent))  # its baggage, too
    try:
        with trace.use_span(made, end_on_exit=True):
            yield made
    finally:
        context.detach(token)


def begin(
    name: str,
    kind: str,
    attributes: Mapping[str, Any],
    *,
    parent: Mapping[str, str] | None = None,
    links: Sequence[Mapping[str, str]] = (),
    lasted_s: float = 0.0,
) -> Any:
    """A span that is not made current. Call only if `is_on`.  lasted_s: how long ago it began."""
    from opentelemetry import propagate, trace

    linked = [trace.get_current_span(propagate.extract(each)).get_span_context() for each in links]
    return trace.get_tracer(_TRACER).start_span(
        name,
        context=None if parent is None else propagate.extract(parent),
        kind=trace.SpanKind[kind],
        attributes=attributes,
        links=[trace.Link(each) for each in linked if each.is_valid],
        start_time=time.time_ns() - round(lasted_s * 1e9),
    )


def headers_of(span: Any) -> dict[str, str]:
    """The context with this span as the current one, as headers."""
    from opentelemetry import propagate, trace

    found: dict[str, str] = {}
    propagate.inject(found, trace.set_span_in_context(span))
    return found


def end(span: Any, error: str = "") -> None:
    """error: why what it stands for failed."""
    if error:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, error))
    span.end()


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
