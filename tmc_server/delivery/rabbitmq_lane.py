"""A lane: one producer's channel to one exchange, and the search for copies that make the broker close it.

The broker closes a channel for the content of a single message (an unusable header, a body over its limit) and does not
say which one. A lane therefore belongs to one producer. After such a close, the copies in flight are sent again in
small groups, one group at a time, then one by one from the group on which the channel closed again; a copy that
closes it alone is the culprit. Its attempt counts, the others are sent together again, and its later attempts are
sent alone from the start.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from pika.exceptions import ChannelWrongStateError, ConnectionWrongStateError
from pika.spec import Basic, BasicProperties

from tmc_server.delivery.rabbitmq_properties import name_of
from tmc_server.delivery.window import Destination
from tmc_server.domain.ports.delivery import Copy

_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_CONTENT = (311, 406)  # content too large, precondition failed: about one message, not about the exchange or the broker
_ONE_BY_ONE = 20  # suspects; more are sent in groups first
_CLOSINGS_A_SECOND = 10
_OFTEN_S = 0.1
_REMEMBERED = 10_000
NO_ROUTE = 312


@dataclass(slots=True, kw_only=True)
class Sent:
    """A copy on its way. group: only copies of one group are in flight together; 0: nothing is known against it.

    overdue: it was not confirmed in time, and no longer counts in the window.
    """

    copy: Copy
    key: str
    properties: BasicProperties
    destination: Destination
    size: int
    at: float
    group: int = 0
    returned: str = ""
    unroutable: bool = False
    overdue: bool = False

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
        """The copy cannot be encoded, or the broker closes the channel over it. The others are still sent."""

    def stranded(self, lane: Lane, sent: Sent) -> None:
        """The channel failed before this copy was confirmed."""


class Lane:
    """On the publisher's thread only, but for `ready`. accepts: ready, or about to be."""

    def __init__(self, owner: LaneOwner, exchange: str) -> None:
        self._owner = owner
        self.exchange = exchange
        self.ready = False
        self.accepts = False
        self._sent: dict[int, Sent] = {}  # by delivery tag, in ascending order
        self._overdue: dict[int, Sent] = {}  # the same, not confirmed in time: in nobody's way
        self._waiting: deque[Sent] = deque()  # behind a copy that is, or has to be, alone
        self._tags: dict[tuple[object, ...], int] = {}  # by what a return brings back
        self._last_tag = 0
        self._closings = 0
        self._groups = itertools.count(1)
        self._content_closings: deque[float] = deque(maxlen=_CLOSINGS_A_SECOND)
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
        """Send it, or queue it behind another group."""
        if sent.row in self._culprits:
            sent.group = next(self._groups)
        if self.ready and not self._waiting and self._may_join(sent):
            self._write(sent)
        else:
            self._waiting.append(sent)
            self._advance()

    def _may_join(self, sent: Sent) -> bool:
        return not self._sent or next(iter(self._sent.values())).group == sent.group

    def _advance(self) -> None:
        while self._waiting and self.ready and self._may_join(self._waiting[0]):
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
        tag = self._tags.get(name_of(method.routing_key, properties), 0)
        sent = self._sent.get(tag) or self._overdue.get(tag)
        if sent is not None:
            sent.returned = method.reply_text
            sent.unroutable = method.reply_code == NO_ROUTE

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        done: list[Sent] = []
        for waiting in (self._overdue, self._sent) if self._overdue else (self._sent,):
            if method.multiple:
                tags = list(takewhile(lambda tag: tag <= method.delivery_tag, waiting))
            else:
                tags = [method.delivery_tag] if method.delivery_tag in waiting else []
            done += [waiting.pop(tag) for tag in tags]
        if not self._sent and not self._overdue:
            self._tags.clear()
        elif len(self._tags) > 4 * (len(self._sent) + len(self._overdue)) + 1000:
            open_ = self._sent.keys() | self._overdue.keys()
            self._tags = {name: tag for name, tag in self._tags.items() if tag in open_}
        self._closings = 0
        self._owner.answered(self, done, nacked=isinstance(method, Basic.Nack))
        self._advance()

    def expire(self, before: float) -> list[Sent]:
        """Mark copies handed over up to `before` that were not confirmed as overdue, and return them.

        They may still arrive, so they stay here: the broker confirms them later, or the channel ends. Copies that only
        waited here, or are under suspicion, say nothing about their queue: they count as stranded.
        """
        late = [sent for sent in self._sent.values() if sent.at <= before]
        stranded = [sent for sent in self._waiting if sent.at <= before] + [sent for sent in late if sent.group]
        self._overdue |= {tag: sent for tag, sent in self._sent.items() if sent.at <= before and not sent.group}
        for sent in late:
            sent.overdue = not sent.group
        self._sent = {tag: sent for tag, sent in self._sent.items() if sent.at > before}
        self._waiting = deque(sent for sent in self._waiting if sent.at > before)
        for sent in stranded:
            self._owner.stranded(self, sent)
        if any(sent.group for sent in late) and self._channel.is_open:
            self._channel.close()  # a later close over one of these would be blamed on the next copy
        elif late or stranded:
            self._advance()
        return [sent for sent in late if not sent.group]

    def restart_clock(self, now: float) -> None:
        """Restart the confirm timeout of all copies, after the broker had blocked publishers."""
        for sent in [*self._sent.values(), *self._waiting]:
            sent.at = now

    def lose_everything(self) -> list[Sent]:
        """Returns: all that was in flight or waiting. It accepts nothing until it is opened again."""
        self.ready = self.accepts = False
        lost = [*self._overdue.values(), *self._sent.values(), *self._waiting]
        self._overdue.clear()
        self._sent.clear()
        self._waiting.clear()
        self._tags.clear()
        return lost

    def _on_close(self, _channel: Any, reason: Any) -> None:
        self.ready = False
        about_content = getattr(reason, "reply_code", 0) in _CONTENT and self._connection.is_open
        if about_content and self._sent:
            for sent in self._overdue.values():
                self._owner.stranded(self, sent)
            self._overdue.clear()
            self._find_culprit(reason)
            self._open_again()
            return
        pause_s = _PAUSES_S[min(self._closings, len(_PAUSES_S) - 1)]
        self._closings += 1
        self._owner.lane_closed(self, self.lose_everything(), reason, pause_s)

    def _open_again(self) -> None:
        """Reopen at once, since each such close narrows down the suspects; after many in a second, wait briefly."""
        now = time.monotonic()
        often = len(self._content_closings) == _CLOSINGS_A_SECOND and now - self._content_closings[0] < 1.0
        self._content_closings.append(now)
        if often:
            connection = self._connection
            connection.ioloop.call_later(_OFTEN_S, lambda: self.open(connection) if connection.is_open else None)
        else:
            self.open(self._connection)

    def _find_culprit(self, reason: Any) -> None:
        suspects = list(self._sent.values())
        self._sent.clear()
        self._tags.clear()
        if len(suspects) > 1:
            size = math.isqrt(len(suspects)) if len(suspects) > _ONE_BY_ONE else 1
            for start in range(0, len(suspects), size):
                group = next(self._groups)
                for suspect in suspects[start : start + size]:
                    suspect.group = group
            self._waiting.extendleft(reversed(suspects))
            return
        (culprit,) = suspects
        self._culprits[culprit.row] = None
        if len(self._culprits) > _REMEMBERED:
            self._culprits.popitem(last=False)
        for other in self._waiting:  # the culprit explains the closing
            other.group = next(self._groups) if other.row in self._culprits else 0
        self._owner.unsendable(self, culprit, reason)
