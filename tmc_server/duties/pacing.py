"""Limit how many pages of checks run at once: in total, per app, and per service; and let failing services rest.

Checks call services that we do not control and that may be slow. One app's services must not affect another app, so
workers, the scarce resource, are limited at three levels:

- all: 64 pages at once. While all workers are busy nothing is claimed, so that no claim waits for a worker.
- an app: 8 pages at once. A page that runs into its deadline halves that, down to one; a page that is answered adds one.
- a service, which is an app in one environment by one way of asking: two pages at once. One that could not be asked rests,
  1 s doubling to 60 s; an outage a minute after the last rest begins with a second again. After a page that was answered
  nothing, the next one is half as long.

Environments (tags) are the sender's choice, so a service of its own for each would give every new tag a fresh start. The
default tags of topics are registered; beside these an app has 16 environments with services of their own. All further
ones share one slot: one page at a time, one rest. An environment of the slot that answers takes the place of the
one that did not answer for the longest time.

No clock and no threads of its own: `Checking` calls it under a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tmc_server.domain.checks import FIRST_BACK_OFF_MS, LONGEST_BACK_OFF_MS

Place = TypeVar("Place")

WORKERS = 64
APP_SHARE = 8
OWN_TAGS = 16
PAGES_AT_ONCE = 2
PLACES_IN_A_PASS = 4
_MOST_SERVICES = 256  # of one app, remembered while they are idle: options change
_MOST_APPS = 1_000
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceName:
    """Identifies a service: one app in one environment, asked in one way."""

    app: int
    tag: str
    kind: str
    address: str
    options: tuple[tuple[str, str], ...]
    tls: bool


@dataclass(slots=True, kw_only=True)
class Service:
    """State of one service, or of all that share a slot.

    size: questions of its next page.  most: pages at once.  alert_again: when its owner is alerted again that it
    cannot be reached, monotonic seconds.
    rest_ms: how long it rests after the last failure.  quiet_until: monotonic seconds.
    """

    app: AppPace
    shared: bool
    size: int
    most: int
    busy: int = 0
    failures: int = 0
    alert_again: float = 0.0
    rest_ms: int = 0
    quiet_until: float = 0.0

    @property
    def does_well(self) -> bool:
        """Return whether it will soon have room again, so that its due checks need not make way for others."""
        return not (self.shared or self.failures or self.app.most < APP_SHARE)

    def pause_ms(self, now: float) -> int:
        return max(0, round((self.quiet_until - now) * 1000))


@dataclass(slots=True, kw_only=True)
class AppPace:
    """One app's part. answered: environments with services of their own, and when each answered last.

    turn: number of its newest page among all pages; the lower, the longer it has waited.
    """

    most: int = APP_SHARE
    busy: int = 0
    turn: int = 0
    answered: dict[str, float] = field(default_factory=dict)
    services: dict[ServiceName, Service] = field(default_factory=dict)
    slot: Service | None = None


def in_turn(waiting: Mapping[int, Sequence[Place]], turns: Callable[[int], int]) -> tuple[list[Place], bool]:
    """One place of each app, then the second of each, and so on: at most four of an app in one pass.

    waiting: places with due messages by app, each app's in the order in which it wants them.  turns: see AppPace.
    Returns: the places, the app that has waited longest first; and whether some were left for the next pass.
    """
    apps = sorted(waiting, key=turns)
    order = [waiting[app][round_] for round_ in range(PLACES_IN_A_PASS) for app in apps if round_ < len(waiting[app])]
    return order, any(len(places) > PLACES_IN_A_PASS for places in waiting.values())


class Pacing:
    """See the module."""

    def __init__(self) -> None:
        self._apps: dict[int, AppPace] = {}
        self._busy = 0
        self._turn = 0

    @property
    def full(self) -> bool:
        """Return whether every worker has a page."""
        return self._busy >= WORKERS

    def app(self, number: int) -> AppPace:
        if number not in self._apps:
            if len(self._apps) >= _MOST_APPS:
                self._apps = {each: app for each, app in self._apps.items() if app.busy}
            self._apps[number] = AppPace()
        return self._apps[number]

    def service(self, name: ServiceName, size: int, concurrency: int, *, registered: bool, now: float) -> Service:
        """size: its longest page.  registered: an operator gave this tag to a topic."""
        app = self.app(name.app)
        if not registered and name.tag not in app.answered:
            if len(app.answered) >= OWN_TAGS:
                if app.slot is None:
                    app.slot = Service(app=app, shared=True, size=size, most=1)
                return app.slot
            app.answered[name.tag] = _NEVER
        if name not in app.services:
            if len(app.services) >= _MOST_SERVICES:
                app.services = {n: s for n, s in app.services.items() if s.busy or s.pause_ms(now)}
            most = PAGES_AT_ONCE if concurrency > 1 else 1
            app.services[name] = Service(app=app, shared=False, size=size, most=most)
        return app.services[name]

    def may_begin(self, service: Service) -> bool:
        """Return whether there is room for another page. Does not consider whether the service rests."""
        return service.busy < service.most and service.app.busy < service.app.most and not self.full

    def begin(self, service: Service) -> None:
        service.busy += 1
        service.app.busy += 1
        self._busy += 1
        self._turn += 1
        service.app.turn = self._turn

    def end(self, service: Service) -> None:
        service.busy -= 1
        service.app.busy -= 1
        self._busy -= 1

    def answered(self, service: Service, tag: str, longest: int, now: float) -> None:
        """Note that the service answered. longest: questions in the longest page it may get."""
        service.failures, service.alert_again = 0, 0.0
        service.size = min(longest, service.size + max(1, longest // 16))
        app = service.app
        app.most = min(APP_SHARE, app.most + 1)
        if service.shared and tag not in app.answered:
            self._forget(app, min(app.answered, key=lambda each: app.answered[each]))
            app.answered[tag] = now
        elif tag in app.answered:
            app.answered[tag] = now

    def failed(self, service: Service, now: float, *, timed_out: bool, asked: float | None = None) -> None:
        """Note that the service was not reached. timed_out: it kept its worker until the deadline.

        asked: when the page began; None: now.

        Messages of a failed page are asked about after those that were not in it.
        """
        if (now if asked is None else asked) - service.quiet_until > LONGEST_BACK_OFF_MS / 1000:
            service.failures = 0  # another outage: it may have been well meanwhile, and had nothing to answer
        service.failures += 1
        if timed_out:
            service.app.most = max(1, service.app.most // 2)
        service.rest_ms = min(LONGEST_BACK_OFF_MS, FIRST_BACK_OFF_MS << min(service.failures - 1, 10))
        service.quiet_until = now + service.rest_ms / 1000

    def shorten(self, service: Service, questions: int) -> None:
        """Let its next page have half of these questions, none of which was answered: one may hang the service, or kill it.

        Pages are halved until that question is alone; then they grow slowly again.
        """
        service.size = max(1, min(service.size, questions) // 2)

    def _forget(self, app: AppPace, tag: str) -> None:
        del app.answered[tag]
        app.services = {name: service for name, service in app.services.items() if name.tag != tag}
