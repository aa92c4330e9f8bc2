"""Listeners: the functions of an app, their topics, and the parameters they take."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, get_args, get_origin, get_type_hints

from tmc_client.codecs import Topic
from tmc_client.consuming.received import Message

if TYPE_CHECKING:
    from tmc_client.consuming.inbox import SqlInbox
    from tmc_client.consuming.turns import BatchSize


@dataclass(frozen=True, kw_only=True)
class Listener:
    """One decorated function. wants_*: names of the parameters for the message and what the inbox connects with.

    batch: it takes lists, of that many messages.  concurrency: calls at once; None: as many as the consumer has threads.
    """

    topic: Topic[Any]
    handler: Callable[..., Any]
    body_type: Any
    wants_message: str | None
    wants_session: str | None
    inbox: SqlInbox | None
    is_async: bool
    limit_s: float
    batch: BatchSize | None = None
    concurrency: int | None = None


class MessageConsumer(Protocol):
    """One object that handles every message of an app's subscriptions; suits topics that share a single queue."""

    def consume(self, message: Message) -> None:
        """Handle one message. Raises: it is retried by the retry policy; `Reject` and `Later` as in listeners."""


class Listeners:
    """All functions of one consumer. max_handling: how long they may run, unless a listener sets its own limit."""

    def __init__(self, max_handling: timedelta) -> None:
        self._limit_s = _limit(max_handling)
        self.by_topic: dict[str, Listener] = {}
        self.everything: MessageConsumer | None = None

    def __bool__(self) -> bool:
        return bool(self.by_topic) or self.everything is not None

    @property
    def need_a_loop(self) -> bool:
        """Return whether one of them is an `async def`."""
        return any(listener.is_async for listener in self.by_topic.values())

    def add(
        self,
        topic: Topic[Any],
        handler: Callable[..., Any],
        inbox: SqlInbox | None,
        max_handling: timedelta | None,
        batch: BatchSize | None = None,
        concurrency: int | None = None,
    ) -> None:
        """Register a function. Raises ValueError: its topic has one already. TypeError: its signature is unusable."""
        if topic.name in self.by_topic:
            raise ValueError(f"topic {topic.name} has a listener already: one function handles one topic")
        limit_s = self._limit_s if max_handling is None else _limit(max_handling)
        listener = _inspected(topic, handler, inbox, limit_s, batch)
        self.by_topic[topic.name] = replace(listener, concurrency=concurrency)

    def attach(self, consumer: MessageConsumer) -> None:
        """Raises ValueError: there is one already."""
        if self.everything is not None:
            raise ValueError("a MessageConsumer is attached already: one object takes everything")
        self.everything = consumer

    def limit_s(self, topic: str) -> float:
        """Return how long a handler of this topic may run."""
        listener = self.by_topic.get(topic)
        return listener.limit_s if listener is not None else self._limit_s

    def name(self, topic: str) -> str:
        """Display name of the function or object that handles this topic."""
        handler = self.by_topic[topic].handler if topic in self.by_topic else self.everything
        return str(getattr(handler, "__qualname__", type(handler).__name__))


def _limit(max_handling: timedelta) -> float:
    """Raises ValueError, TypeError."""
    if not isinstance(max_handling, timedelta):
        raise TypeError(f"max_handling must be a timedelta, for example timedelta(minutes=10), not {max_handling!r}")
    if max_handling <= timedelta(0):
        raise ValueError(f"max_handling must be positive, not {max_handling}")
    return max_handling.total_seconds()


_HANDLES = ("session", "connection")
_FORMS = ("model_validate_json", "FromString", "__dataclass_fields__", "__attrs_attrs__", "__struct_fields__")


def _is_unreadable(body_type: Any) -> bool:
    """Return whether this is a class that no body can be decoded to: a session, a client, tmc.Message."""
    if not isinstance(body_type, type) or body_type.__module__.partition(".")[0] in sys.stdlib_module_names:
        return False
    plain = issubclass(body_type, dict | list | tuple | str | int | float | Enum)
    return body_type is Message or not (plain or any(hasattr(body_type, form) for form in _FORMS))


def _inspected(
    topic: Topic[Any],
    handler: Callable[..., Any],
    inbox: SqlInbox | None,
    limit_s: float,
    batch: BatchSize | None,
) -> Listener:
    try:
        hints = get_type_hints(handler)
    except NameError as exc:
        raise TypeError(
            f"{handler.__name__}(): an annotation cannot be resolved at runtime ({exc}): import it outside of "
            "TYPE_CHECKING"
        ) from exc
    names = list(inspect.signature(handler).parameters)
    if not names:
        raise TypeError(f"{handler.__name__}() must take the body as its first parameter")
    body_type = hints.get(names[0], topic.type)
    if batch is not None:
        body_type = _item(handler, names[0], hints.get(names[0]), topic)
    if _is_unreadable(body_type):
        raise TypeError(
            f"{handler.__name__}(): no body can be read as {body_type.__name__}, the type of its first parameter, which is "
            "the body: take bytes, str, dict, list, a dataclass, a pydantic model or a protobuf message"
        )
    wanted: Any = Message if batch is None else list[Message]
    wants_message = next((name for name in names[1:] if hints.get(name) == wanted), None)
    wants_session = next((name for name in names[1:] if name in _HANDLES), None)
    unknown = [name for name in names[1:] if name not in (wants_message, wants_session)]
    if unknown:
        raise TypeError(
            f"{handler.__name__}(): unknown parameters {unknown}; known are the body, session or connection, and a "
            f"{'tmc.Message' if batch is None else 'list[tmc.Message]'}"
        )
    if wants_session and inbox is None:
        raise TypeError(f"{handler.__name__}() wants a {wants_session}: give the listener inbox=SqlInbox(sessionmaker)")
    is_async = inspect.iscoroutinefunction(handler)
    if inbox is not None and (inspect.isclass(inbox) or not hasattr(inbox, "once_each")):
        raise TypeError(
            f"{handler.__name__}(): inbox= takes an inbox, not {getattr(inbox, '__name__', type(inbox).__name__)}: write "
            "inbox=tmc.SqlInbox(sessionmaker(engine)), or in Django inbox=tmc_django.inbox()"
        )
    if inbox is not None and inbox.stays_in_thread and is_async:
        raise TypeError(
            f"{handler.__name__}(): what its inbox writes with belongs to one thread, and an `async def` runs in another: write "
            "`def`"
        )
    if inbox is not None and inbox.is_async and not is_async:
        raise TypeError(
            f"{handler.__name__}(): its inbox makes AsyncSessions: write `async def`, or give it SqlInbox(sessionmaker(engine))"
        )
    return Listener(
        topic=topic,
        handler=handler,
        body_type=body_type,
        wants_message=wants_message,
        wants_session=wants_session,
        inbox=inbox,
        is_async=is_async,
        limit_s=limit_s,
        batch=batch,
    )


def _item(handler: Callable[..., Any], name: str, hint: Any, topic: Topic[Any]) -> Any:
    """Return what each body of a batch is read as. Raises TypeError: the parameter is no list."""
    if hint is None or hint is list:
        return topic.type
    if get_origin(hint) not in (list, Sequence):
        raise TypeError(f"{handler.__name__}(): a batch listener takes a list of bodies: annotate {name}: list[...]")
    (item,) = get_args(hint)
    return item
