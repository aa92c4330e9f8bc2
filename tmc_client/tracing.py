"""Spans of the SDK: prepare, publish, submit and rollback of producers; receive, process, ack and nack of consumers; checks.

A message carries the context of its prepare, so hours may pass until the next span of its trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from tmc_client import errors
from tmc_common import tracing
from tmc_common.headers import context_of, fitting

if TYPE_CHECKING:
    from tmc_client.checks.questions import Question
    from tmc_client.consuming.received import Message

_KINDS = {
    "prepare": "create",
    "publish": "send",
    "submit": "send",
    "rollback": "send",
    "ack": "settle",
    "nack": "settle",
}
_COUNT = "messaging.batch.message_count"
_CREATE = ("prepare", "publish")


def injected(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers, with the current context."""
    return dict(headers) | fitting(headers, tracing.carried())


@contextmanager
def traced(operation: str, request: Any, future: Any) -> Iterator[Mapping[str, str]]:
    """A span from a call of the center to its answer, the result of `future`. Yields: the span's context.

    A new message carries the context it was made in: that of its headers, the current one, or that of this span.
    """
    if not tracing.is_on() or operation not in _KINDS:
        yield {}
        return
    topic = getattr(request, "topic", "")
    attributes = tracing.messaging(operation, _KINDS[operation], topic, getattr(request, "message_id", ""))
    is_new = operation in _CREATE
    parent = context_of(request.headers) if is_new else {}
    name = f"{operation} {topic}" if is_new else operation
    span = tracing.begin(name, "PRODUCER" if is_new else "CLIENT", attributes, parent=parent or None)
    context = tracing.headers_of(span)
    if is_new:
        request.headers.update(fitting(request.headers, context))
    future.add_done_callback(partial(_answered, span))
    try:
        yield context
    except errors.TmcError as exc:  # nothing was sent
        tracing.end(span, str(exc))
        raise


def _answered(span: Any, future: Any) -> None:
    if future.cancelled():
        tracing.end(span, "cancelled")
        return
    failure = future.exception()
    message_id = getattr(future.result(), "message_id", "") if failure is None else ""
    if message_id:
        tracing.note(span, "messaging.message.id", message_id)
    tracing.end(span, "" if failure is None else str(failure))


@contextmanager
def calling(method: str, contexts: Sequence[Mapping[str, str]]) -> Iterator[tuple[tuple[str, str], ...]]:
    """One RPC that carries calls of these contexts. Yields: its metadata."""
    if not any(contexts):
        yield ()
        return
    service, _, name = method.lstrip("/").rpartition("/")
    attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
    parent, links = (contexts[0], ()) if len(contexts) == 1 else ({}, contexts)
    with tracing.span(method.lstrip("/"), "CLIENT", attributes, parent=parent, links=links):
        yield tracing.metadata()


@contextmanager
def handling(messages: Sequence[Message], waited_s: float) -> Iterator[None]:
    """A span around a handler, in the trace of the first message, and one for how long they waited for it here."""
    if not tracing.is_on():
        yield
        return
    first, *others = messages
    attributes = _attributes("process", "process", messages)
    links = [message.headers for message in others]
    received = _attributes("receive", "receive", messages)
    waiting = tracing.begin(
        f"receive {first.topic}", "CONSUMER", received, parent=first.headers, links=links, lasted_s=waited_s
    )
    tracing.end(waiting)
    with tracing.span(f"process {first.topic}", "CONSUMER", attributes, parent=first.headers, links=links):
        yield


def _attributes(operation: str, kind: str, messages: Sequence[Message]) -> dict[str, Any]:
    first = messages[0]
    more: dict[str, Any] = {"messaging.consumer.group.name": first.subscriber}
    if len(messages) > 1:
        return tracing.messaging(operation, kind, first.topic, more=more | {_COUNT: len(messages)})
    return tracing.messaging(operation, kind, first.topic, first.id, more | {"tmc.attempt": first.attempt})


@contextmanager
def answering(questions: Sequence[Question], headers: Mapping[str, str]) -> Iterator[None]:
    """A span around the answers to checks. headers: of the center's call; a web framework's span goes first."""
    if not (tracing.is_on() and questions):
        yield
        return
    first, several = questions[0], len(questions) > 1
    attributes = tracing.messaging(
        "check", "", first.topic, "" if several else first.message_id, {_COUNT: len(questions)} if several else {}
    )
    with tracing.within(headers), tracing.span(f"check {first.topic}", "SERVER", attributes):
        yield
