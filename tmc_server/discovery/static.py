"""Instances named in the configuration, and instances as producers name themselves: for centers without Consul."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tmc_server.domain.catalog import App
from tmc_server.domain.ports.checks import Instance, SeenSenders


class StaticInstances:
    """domain.ports.checks.Instances. known: addresses by `app` or, more closely, `app@tag`."""

    hint = 'discovery.kind is "static": add it to [discovery.instances] of all servers.'

    def __init__(self, known: Mapping[str, Sequence[str]]) -> None:
        self._known = known

    def instances(self, app: App, tag: str) -> Sequence[Instance]:
        known = self._known.get(f"{app.id}@{tag}") or self._known.get(app.id, ())
        return [Instance(address) for address in random.sample(known, len(known))]


class RecordedInstances:
    """domain.ports.checks.Instances: where messages of that app and tag came from lately, as their senders said.

    The newest first: an address seen an hour ago may be gone, and one that serves is seen again and again.
    """

    hint = (
        "Has it called center.checks().serve()? One that answers over HTTP needs connect(check_address=...), and is known a "
        "second after its first call."
    )

    def __init__(self, senders: SeenSenders) -> None:
        self._senders = senders

    def instances(self, app: App, tag: str) -> Sequence[Instance]:
        return self._senders.seen_at(app.number, tag)
