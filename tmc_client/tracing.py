"""Propagate the trace context from Prepare to the handler, as W3C `traceparent` in the message's headers.

A no-op unless the program uses OpenTelemetry. Hours may pass between the two spans.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tmc_client.received import Message


def injected(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers, with the current span's context unless they carry one already."""
    carried = dict(headers)
    if "opentelemetry.propagate" in sys.modules or "opentelemetry.trace" in sys.modules:
        from opentelemetry import propagate

        found: dict[str, str] = {}
        propagate.inject(found)
        carried = {name: found[name] for name in ("traceparent", "tracestate") if name in found} | carried
    return carried


@contextmanager
def handling(message: Message) -> Iterator[None]:
    """A consumer span around a handler, in the trace of the producer that prepared the message."""
    if "opentelemetry.trace" not in sys.modules:
        yield
        return
    from opentelemetry import propagate, trace

    attributes = {
        "messaging.system": "tmc",
        "messaging.operation.type": "process",
        "messaging.destination.name": message.topic,
        "messaging.message.id": message.id,
    }
    with trace.get_tracer("tmc_client").start_as_current_span(
        f"process {message.topic}",
        context=propagate.extract(message.headers),
        kind=trace.SpanKind.CONSUMER,
        attributes=attributes,
    ):
        yield
