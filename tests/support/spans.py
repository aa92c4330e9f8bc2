"""The spans of this process, kept in memory. OpenTelemetry takes one provider per process, so it is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tmc_storm.eventually import eventually

_PROVIDER = TracerProvider()


class Spans:
    """What was finished since the beginning of the block."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def named(self, name: str) -> Sequence[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def only(self, name: str, found: Callable[[ReadableSpan], bool] = lambda _span: True) -> ReadableSpan:
        """The one span of this name, as soon as there is one."""
        eventually(lambda: any(map(found, self.named(name))))
        (span,) = filter(found, self.named(name))
        return span

    def names(self, trace_id: int) -> list[str]:
        """Of one trace, in the order in which they began."""
        spans = [span for span in self._exporter.get_finished_spans() if trace_of(span) == trace_id]
        return [span.name for span in sorted(spans, key=lambda span: span.start_time or 0)]


def trace_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


@contextmanager
def recorded() -> Iterator[Spans]:
    if trace.get_tracer_provider() is not _PROVIDER:
        trace.set_tracer_provider(_PROVIDER)
    exporter = InMemorySpanExporter()
    processor = SimpleSpanProcessor(exporter)
    _PROVIDER.add_span_processor(processor)
    try:
        yield Spans(exporter)
    finally:
        exporter.shutdown()  # processors cannot be removed: it keeps nothing more
