"""Look after lines of order keys: a page of each subscription's lines in every run, from where the last run ended."""

from __future__ import annotations

from tmc_common.eventlog import EventLog
from tmc_server.domain.catalog import Catalog, Subscription
from tmc_server.domain.numbers import OrderHash, Shard, SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.ordering import FIRST_LINE, LineWork
from tmc_server.errors import StoreUnavailable

log = EventLog("tmc.duties")


class Ordering:
    """page: lines of one subscription and shard that are examined at once."""

    def __init__(self, work: LineWork, catalog: CatalogSource, page: int = 500) -> None:
        self._work = work
        self._catalog = catalog
        self._page = page
        self._after: dict[tuple[Shard, SubscriptionNumber], OrderHash] = {}
        self._ended: set[tuple[Shard, SubscriptionNumber]] = set()  # removed subscriptions without lines

    def run_once(self) -> bool:
        """Examine a page of each. Returns: something was repaired, there may be more.

        A failure does not stop the others; the first one is raised after all have had their turn.
        """
        changed = 0
        failure: Exception | None = None
        catalog = self._catalog.current
        for shard in self._work.held_shards():
            for subscription in catalog.subscriptions_on.get(shard, ()):
                if catalog.is_ordered(subscription.number) and (shard, subscription.number) not in self._ended:
                    try:
                        changed += self._turn(catalog, shard, subscription)
                    except StoreUnavailable:
                        raise
                    except Exception as exc:  # noqa: BLE001 - raised below
                        failure = failure or exc
        if failure is not None:
            raise failure
        return bool(changed)

    def _turn(self, catalog: Catalog, shard: Shard, subscription: Subscription) -> int:
        place = (shard, subscription.number)
        done = self._work.repair(shard, subscription.number, self._after.get(place, FIRST_LINE), self._page)
        self._after[place] = FIRST_LINE if done.after is None else done.after
        if subscription.is_removed and not done.examined:
            self._ended.add(place)
        if done.changed:
            topic = catalog.topics[subscription.topic].name
            app = catalog.apps[subscription.app].id
            log.info("order_repaired", "order of %s for %s: %d deliveries no longer wait", topic, app, done.changed)
        return done.changed
