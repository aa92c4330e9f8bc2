"""Copies go to consumers or to their forwarder; a forwarder that is missing is noticed."""

from __future__ import annotations

from dataclasses import replace

from tests.support.outlet import SomeCatalog
from tests.support.store import RecordingOutlet
from tmc_server.delivery.routing import RoutingOutlet
from tmc_server.domain.catalog import Forward
from tmc_server.domain.consumption import QueueLook


def test_rows_for_a_forwarder_that_is_not_installed_wait_and_are_reported() -> None:
    missing: list[tuple[int, str]] = []
    catalog = SomeCatalog("coupons", 1, forwards=[Forward("kafka", "there", "")])
    outlet = RoutingOutlet(
        catalog, RecordingOutlet(), {}, lambda subscription, kind: missing.append((subscription, kind))
    )
    assert outlet.look(1) is not None
    assert outlet.reserve(2, 5) == 0
    assert missing == []  # nothing of it is due
    assert outlet.look(2) is None
    assert missing == [(2, "kafka")]


def test_rows_of_a_removed_subscription_are_cancelled_whatever_its_outlet_says() -> None:
    """Nobody needs a forwarder any more that only a removed subscription had."""
    missing: list[int] = []
    catalog = SomeCatalog("coupons", 1, forwards=[Forward("kafka", "there", "")])
    removed = replace(catalog.current.subscriptions[2], removed_ms=1)
    catalog.current = replace(catalog.current, subscriptions={**catalog.current.subscriptions, 2: removed})
    outlet = RoutingOutlet(catalog, RecordingOutlet(), {}, lambda subscription, _: missing.append(subscription))
    assert outlet.look(2) == QueueLook()
    assert missing == []
