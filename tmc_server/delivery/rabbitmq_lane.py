"""A lane: the confirmed channel of one producer and one exchange, and the search for copies that make the broker close it.

The broker closes a channel for the content of a single message (an unusable header, a body over its limit) and does not
say which one. A lane therefore belongs to one producer: nobody else loses anything. What was in flight is sent again one
at a time, each alone on the channel; the copy on which it closes again is the culprit. Its try counts, its neighbors
go on together, and its next tries are sent alone from the start.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from pika.exceptions import ChannelWrongStateError, ConnectionWrongStateError
from pika.spec import Basic, BasicProperties

from tmc_server.delivery.rabbitmq_properties import name_of
from tmc_server.delivery.window import Destination
from tmc_server.domain.ports import Copy

_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_CONTENT = (311, 406)  # content too large, precondition failed: about one message, not about the exchange or the broker
_REMEMBERED = 10_000
NO_ROUTE = 312


@dataclass(slots=True, kw_only=True)
class Sent:
    """A copy on its way. alone: nothing else may be in flight on its channel."""

    copy: Copy
    key: str
    properties: BasicProperties
    destination: Destination
    size: int
    at: float
    alone: bool = False
    returned: str = ""
    unroutable: bool = False

    @property
    def row(self) -> tuple[int, int, int]:
        return self.copy.shard, self.copy.number, self.copy.subscription


class LaneOwner(Protocol):
    """What a lane reports to. On the publisher's thread."""

    def lane_ready(self, lane: Lane) -> None:
        """It takes copies."""

    def lane_closed(self, lane: Lane, lost: list[Sent], reason: Any, pause_s: float) -> None:
        """The broker closed it and `lost` will not be answered; it opens again after the pause."""

    def answered(self, lane: Lane, done: list[Sent], nacked: bool) -> None:
        """The broker confirmed or refused these."""

    def unsendable(self, lane: Lane, sent: Sent, reason: object) -> None:
        """No frame holds this copy, or the broker closes the channel for its content. Its neighbors go out."""

    def stranded(self, lane: Lane, sent: Sent) -> None:
        """The channel went away under this copy."""


class Lane:
    """On the publisher's thread only, but for `ready`. accepts: ready, or about to be."""

    def __init__(self, owner: LaneOwner, exchange: str) -> None:
        self._owner = owner
        self.exchange = exchange
        self.ready = False
        self.accepts = False
        self._sent: dict[int, Sent] = {}  # by delivery tag, in ascending order
        self._waiting: deque[Sent] = deque()  # behind a copy that is, or has to be, alone
        self._tags: dict[tuple[object, ...], int] = {}  # by what a return brings back
        self._last_tag = 0
        self._closings = 0
        self._culprits: OrderedDict[tuple[int, int, int], None] = OrderedDict()
        self._channel: Any = None
        self._connection: Any = None

    @property
    def in_flight(self) -> int:
        return len(self._sent)

    def open(self, connection: Any) -> None:
        self._connection = connection
        self.accepts = True
        connection.channel(on_open_callback=self._on_open)

    def _on_open(self, channel: Any) -> None:
        self._channel = channel
        self._last_tag = 0
        channel.add_on_close_callback(self._on_close)
        channel.add_on_return_callback(self._on_return)
        channel.confirm_delivery(self._on_confirm, callback=self._on_confirming)

    def _on_confirming(self, _frame: object) -> None:
        self.ready = True
        self._owner.lane_ready(self)
        self._advance()

    def publish(self, sent: Sent) -> None:
        """Send it, or queue it behind a copy that has to be alone."""
        sent.alone = sent.row in self._culprits
        if self.ready and not (self._waiting or sent.alone or self._holds_one_alone):
            self._write(sent)
        else:
            self._waiting.append(sent)
            self._advance()

    @property
    def _holds_one_alone(self) -> bool:
        return len(self._sent) == 1 and next(iter(self._sent.values())).alone

    def _advance(self) -> None:
        while self._waiting and self.ready and not self._holds_one_alone:
            if self._waiting[0].alone and self._sent:
                return
            self._write(self._waiting.popleft())

    def _write(self, sent: Sent) -> None:
        try:
            self._channel.basic_publish(self.exchange, sent.key, sent.copy.body, sent.properties, mandatory=True)
        except (ChannelWrongStateError, ConnectionWrongStateError):
            self._owner.stranded(self, sent)
            return
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is about this copy
            self._owner.unsendable(self, sent, repr(exc))
            return
        self._last_tag += 1
        self._sent[self._last_tag] = sent
        self._tags[name_of(sent.key, sent.properties)] = self._last_tag

    def _on_return(self, _channel: Any, method: Any, properties: BasicProperties, _body: bytes) -> None:
        tag = self._tags.get(name_of(method.routing_key, properties))
        if tag is not None and tag in self._sent:
            self._sent[tag].returned = method.reply_text
            self._sent[tag].unroutable = method.reply_code == NO_ROUTE

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        if method.multiple:
            tags = list(takewhile(lambda tag: tag <= method.delivery_tag, self._sent))
        else:
            tags = [method.delivery_tag] if method.delivery_tag in self._sent else []
        done = [self._sent.pop(tag) for tag in tags]
        if not self._sent:
            self._tags.clear()
        elif len(self._tags) > 4 * len(self._sent) + 1000:
            self._tags = {name: tag for name, tag in self._tags.items() if tag in self._sent}
        self._closings = 0
        self._owner.answered(self, done, nacked=isinstance(method, Basic.Nack))
        self._advance()

    def expire(self, before: float) -> list[Sent]:
        """Take out what was handed over before that moment and never answered."""
        late = [sent for sent in [*self._sent.values(), *self._waiting] if sent.at <= before]
        if late:
            self._sent = {tag: sent for tag, sent in self._sent.items() if sent.at > before}
            self._waiting = deque(sent for sent in self._waiting if sent.at > before)
            self._advance()
        return late

    def restart_clock(self, now: float) -> None:
        """The broker stood still: the time it took is not charged to what is in flight."""
        for sent in [*self._sent.values(), *self._waiting]:
            sent.at = now

    def lose_everything(self) -> list[Sent]:
        """Returns: all that was in flight or waiting. It accepts nothing until it is opened again."""
        self.ready = self.accepts = False
        lost = [*self._sent.values(), *self._waiting]
        self._sent.clear()
        self._waiting.clear()
        self._tags.clear()
        return lost

    def _on_close(self, _channel: Any, reason: Any) -> None:
        self.ready = False
        about_content = getattr(reason, "reply_code", 0) in _CONTENT and self._connection.is_open
        if about_content and self._sent:
            self._find_culprit(reason)
            self.open(self._connection)  # at once: each such closing takes a culprit out, or leaves fewer suspects
            return
        pause_s = _PAUSES_S[min(self._closings, len(_PAUSES_S) - 1)]
        self._closings += 1
        self._owner.lane_closed(self, self.lose_everything(), reason, pause_s)

    def _find_culprit(self, reason: Any) -> None:
        suspects = list(self._sent.values())
        self._sent.clear()
        self._tags.clear()
        if len(suspects) > 1:
            for suspect in suspects:
                suspect.alone = True
            self._waiting.extendleft(reversed(suspects))
            return
        (culprit,) = suspects
        self._culprits[culprit.row] = None
        if len(self._culprits) > _REMEMBERED:
            self._culprits.popitem(last=False)
        for other in self._waiting:  # the culprit explains the closing
            other.alone = other.row in self._culprits
        self._owner.unsendable(self, culprit, reason)
