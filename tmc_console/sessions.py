"""Who is logged in. The operator's token stays in this process; the browser gets a random cookie that says nothing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tmc_common.protocol import admin_pb2

IDLE_S = 30 * 60.0
LONGEST_S = 12 * 3600.0
WRITING_S = 15 * 60.0
_MOST = 1_000
_MOST_OF_ONE = 20  # sessions of one operator


@dataclass(kw_only=True)
class Session:
    """operator: as the center knows it.  csrf: what every form of the session carries.

    writing_until: actions are shown and accepted until then, monotonic seconds; pages only show what is there otherwise.
    notice: what the next page says, once.  streams: of events that are open.
    """

    token: str
    operator: admin_pb2.Operator
    began: float
    used: float
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    writing_until: float = 0.0
    notice: str = ""
    streams: int = 0


class Sessions:
    """In memory: a restart ends all sessions."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.monotonic = monotonic
        self._sessions: dict[str, Session] = {}

    def begin(self, token: str, operator: admin_pb2.Operator) -> str:
        """Returns: the cookie, another one at each login."""
        now = self.monotonic()
        self._forget_old(now)
        own = [cookie for cookie, session in self._sessions.items() if session.operator.name == operator.name]
        if len(own) >= _MOST_OF_ONE:
            self.end(min(own, key=lambda each: self._sessions[each].used))
        elif len(self._sessions) >= _MOST:
            self.end(min(self._sessions, key=lambda each: self._sessions[each].used))
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = Session(token=token, operator=operator, began=now, used=now)
        return cookie

    def find(self, cookie: str, *, is_used: bool = True) -> Session | None:
        """is_used: False: by a page that asks by itself, which keeps no session alive."""
        session = self._sessions.get(cookie)
        now = self.monotonic()
        if session is None or _is_over(session, now):
            self._sessions.pop(cookie, None)
            return None
        if is_used:
            session.used = now
        return session

    def end(self, cookie: str) -> None:
        self._sessions.pop(cookie, None)

    def streams(self, operator: str | None = None) -> int:
        """Return how many streams of events are open; operator: of this one only, by name."""
        return sum(
            each.streams for each in self._sessions.values() if operator is None or each.operator.name == operator
        )

    def may_write(self, session: Session) -> bool:
        """Return whether the operator has switched actions on."""
        return self.monotonic() < session.writing_until

    def switch_writing(self, session: Session, on: bool) -> None:
        session.writing_until = self.monotonic() + WRITING_S if on else 0.0

    def _forget_old(self, now: float) -> None:
        for cookie in [cookie for cookie, session in self._sessions.items() if _is_over(session, now)]:
            del self._sessions[cookie]


def _is_over(session: Session, now: float) -> bool:
    return now - session.used >= IDLE_S or now - session.began >= LONGEST_S
