"""From a target to addresses that may be connected to: discovery or the target's own host, resolved once, each one checked.

What is handed out is an address, never a name: a second look-up cannot lead the connection elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from tmc_server.domain.catalog import App
from tmc_server.domain.checks import CheckAnswer, CheckReason, CheckTarget
from tmc_server.domain.egress import Egress
from tmc_server.domain.ports.checks import Endpoint, Instance, Instances
from tmc_server.errors import Unavailable
from tmc_server.outgoing import NotPermitted, Resolver, permitted, resolve

MOST_TRIED = 16  # of instances of a service that have not said which ledger they have: some have just gone


class Addressing:
    """trusted: instances from discovery count as listed; those that senders name themselves do not."""

    def __init__(self, instances: Instances, egress: Egress, trusted: bool, resolver: Resolver = resolve) -> None:
        self._instances = instances
        self._egress = egress
        self._trusted = trusted
        self._resolver = resolver

    def endpoints(
        self, target: CheckTarget, app: App, tag: str, ledgers: Collection[bytes] = ()
    ) -> list[Endpoint] | CheckAnswer:
        """Return where to ask, in the order to try them in; an UNKNOWN answer when there is nowhere to ask. Blocks.

        ledgers: those that are asked about; instances that have one of them come first.
        """
        if target.address:
            instances, listed = [Instance(target.address)], None
        else:
            try:
                instances, listed = list(self._instances.instances(app, tag)), self._trusted
            except Unavailable as exc:
                return CheckAnswer.unknown(CheckReason.NO_INSTANCE, exc.sentence)
            if not instances:
                where = f"No instance of {app.service_name!r} in environment {tag!r} is known. {self._instances.hint}"
                return CheckAnswer.unknown(CheckReason.NO_INSTANCE, where)
        good: list[Endpoint] = []
        problem = CheckAnswer.unknown(CheckReason.NO_INSTANCE)
        others = MOST_TRIED
        for instance in sorted(instances, key=lambda each: _how_far(each, ledgers)):
            others -= instance.ledger_id not in ledgers
            if others < 0:
                break
            found = self._endpoints(instance, listed)
            if isinstance(found, CheckAnswer):
                problem = found
            else:
                good += random.sample(found, len(found))
        return good or problem

    def _endpoints(self, instance: Instance, listed: bool | None) -> Sequence[Endpoint] | CheckAnswer:
        """listed None: it is, if the allow-list names it."""
        try:
            found = permitted(self._egress, instance.address, "[checks] allow", listed=listed, resolver=self._resolver)
        except NotPermitted as exc:
            return CheckAnswer.unknown(CheckReason.REFUSED_TARGET, str(exc))
        except (OSError, UnicodeError) as exc:
            return CheckAnswer.unknown(CheckReason.UNREACHABLE, f"{instance.address} has no address: {exc}.")
        return [replace(each, ledger_id=instance.ledger_id) for each in found]


def _how_far(instance: Instance, ledgers: Collection[bytes]) -> int:
    """Rank an instance by what is asked about: it has one of these ledgers, it may have one, it has another one."""
    if instance.ledger_id in ledgers:
        return 0
    return 2 if instance.ledger_id else 1
