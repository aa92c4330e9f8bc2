"""Instances of producers' services, from Consul: those that pass their checks and carry the tag."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

from consul import ConsulException
from requests import RequestException

from tmc_common.consul import agent_client, passing
from tmc_server.domain.catalog import App
from tmc_server.domain.ports.checks import Instance
from tmc_server.errors import DiscoveryUnavailable

_FRESH_S = 2.0
_MOST_KNOWN = 1_000


class ConsulInstances:
    """domain.ports.checks.Instances. While Consul is away the last list it gave is used."""

    hint = "Consul has none with that name and tag that passes its check: does it call checks.serve(agent=...)?"

    def __init__(self, agent: str, token: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._client = agent_client(agent, token, timeout_s=3)
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[float, Sequence[str]]] = {}

    def instances(self, app: App, tag: str) -> Sequence[Instance]:
        found = self._fresh(app, tag)
        return [Instance(address) for address in random.sample(found, len(found))]

    def _fresh(self, app: App, tag: str) -> Sequence[str]:
        key = (app.service_name, tag)
        read, known = self._known.get(key, (float("-inf"), None))
        if known is not None and self._monotonic() - read < _FRESH_S:
            return known
        try:
            found = self._ask(app, tag)
        except (ConsulException, RequestException) as exc:
            if known is None:
                raise DiscoveryUnavailable from exc
            return known
        self._remember(key, found)
        return found

    def _ask(self, app: App, tag: str) -> Sequence[str]:
        with self._lock:  # one HTTP session
            _, nodes = self._client.health.service(app.service_name, passing=True, tag=tag)
        return passing(nodes)

    def _remember(self, key: tuple[str, str], found: Sequence[str]) -> None:
        """Senders choose tags: when the cache is full, entries without instances are dropped."""
        if len(self._known) >= _MOST_KNOWN:
            self._known = {name: entry for name, entry in list(self._known.items()) if entry[1]}
        self._known[key] = (self._monotonic(), found)
