"""Consul: watch the instances of the center, and register a service of your own. Needs `tmc-client[consul]`.

A watch keeps the last list from Consul: while Consul is unreachable or empty, calls continue as before.
"""

from __future__ import annotations

import logging
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field

import requests
from consul import ConsulException

from tmc_common.addresses import HostPort
from tmc_common.consul import Registration, agent_client, passing

__all__ = ["ConsulAddress", "Registration", "Watch"]

log = logging.getLogger("tmc_client.discovery")

_WAIT_S = 55
_PAUSE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ConsulAddress:
    """consul://HOST:PORT/SERVICE?tag=TAG&token=TOKEN"""

    agent: str
    service: str
    tag: str
    token: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> ConsulAddress:
        """Raises ValueError saying what is expected."""
        # The input may contain a token, so the message does not repeat it.
        expected = "This is no address in Consul: give consul://HOST:PORT/SERVICE?tag=TAG&token=TOKEN (both optional)."
        try:
            parts = urllib.parse.urlsplit(text)
            agent = str(HostPort(parts.hostname or "", parts.port or 8500))
        except ValueError:
            raise ValueError(expected) from None
        query = dict(urllib.parse.parse_qsl(parts.query))
        service = parts.path.strip("/")
        if parts.scheme != "consul" or not parts.hostname or not service or set(query) - {"tag", "token"}:
            raise ValueError(expected)
        return cls(agent=agent, service=service, tag=query.get("tag", ""), token=query.get("token", ""))


class Watch:
    """Follows the passing instances of one service. on_change: called in the watch's thread with a new list, never empty."""

    def __init__(self, address: ConsulAddress, on_change: Callable[[list[str]], None]) -> None:
        self._address = address
        self._on_change = on_change
        self._client = agent_client(address.agent, address.token, timeout_s=5)
        self._stopping = threading.Event()
        self._known: list[str] = []
        self._index = 0
        self._away = False
        self._thread = threading.Thread(target=self._run, name="tmc-watch", daemon=True)

    def start(self) -> list[str]:
        """Query once, then watch in a thread. Returns: the passing instances; empty if none or no answer."""
        self._ask(blocking=False)
        self._thread.start()
        return self._known

    def stop(self) -> None:
        self._stopping.set()  # the thread ends with its current query, at most a minute later; it holds no resources

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                answered = self._ask(blocking=True)
            except Exception:
                log.exception("following the instances failed and is retried")
                answered = False
            if not answered:
                self._stopping.wait(_PAUSE_S)

    def _ask(self, blocking: bool) -> bool:
        """Returns: Consul answered."""
        try:
            index, nodes = self._client.health.service(
                self._address.service,
                passing=True,
                tag=self._address.tag or None,
                index=self._index if blocking else None,
                wait=f"{_WAIT_S}s",
            )
        except (ConsulException, requests.RequestException) as exc:
            if not self._away:
                log.warning("Consul does not answer, the last known instances are used: %s", exc)
            self._away, self._index = True, 0
            return False
        self._away = False
        self._index = int(index) if int(index) >= self._index else 0  # gone backwards: Consul was restored or wiped
        found = passing(nodes)
        if found and found != self._known:
            self._known = found
            self._on_change(found)
        elif not found and self._known and blocking:
            self._stopping.wait(_PAUSE_S)  # an empty catalog is no reason to drop the known instances
        return True
