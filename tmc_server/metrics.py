"""Every metric of the server, as one list; docs/telemetry.md is compared with it. Labels are bounded: never a message id."""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from tmc_server.domain.catalog import Catalog
from tmc_server.domain.numbers import SubscriptionNumber

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 400, 1000)


OTHER = "other"


class _BoundedNames:
    """Bounds the number of series: the first `limit` topic and app pairs get their own, all others share "other"."""

    def __init__(self, limit: int = 1_000) -> None:
        self.limit = limit
        self._known: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def of(self, topic: str, app: str) -> tuple[str, str]:
        pair = (topic, app)
        if pair not in self._known:
            with self._lock:
                if len(self._known) >= self.limit and pair not in self._known:
                    return OTHER, OTHER if app else ""
                self._known.add(pair)
        return pair


class Metrics:
    """Names are those of docs/telemetry.md."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tmc_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tmc_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"tmc_{name}", text, labels, buckets=buckets, registry=registry)

        self.registry = registry
        ProcessCollector(registry=registry)
        self.names = _BoundedNames()
        self.prepared = counter("prepared", "messages stored by Prepare", "topic")
        self.submitted = counter("submitted", "messages submitted, published or committed by a check", "topic")
        self.rolled_back = counter("rolled_back", "messages rolled back, by their producer or by a check", "topic")
        self.acked = counter("acked", "acks stored", "topic", "app")
        self.nacked = counter("nacked", "failed attempts stored", "topic", "app")
        self.forged = counter("forged", "copies that consumers refused since they were not signed", "topic", "app")
        self.failed = counter("failed", "deliveries given up: rejected, or attempts used up", "topic", "app")
        self.redelivered = counter("redelivered", "due deliveries handed over by the redelivering duty")
        self.removed = counter("removed", "closed messages removed by the retention duty")
        self.held = counter("held", "due deliveries that waited for an earlier copy in their queue")
        self.rescued = counter("rescued", "deliveries of a dead server, made due again")
        self.checked = counter("checked", "answers to checks", "topic", "verdict", "reason")
        self.check_failed = counter("check_failed", "messages without a verdict at the limit of their checks")
        self.check_seconds = histogram("check_seconds", "one page of checks, asked and answered", _SECONDS, "kind")
        self.first_check_late_seconds = histogram(
            "first_check_late_seconds", "from the time a first check is due to its start", _SECONDS
        )
        self.published = counter("published", "copies published to the broker")
        self.returned = counter("returned", "copies that the broker returned, refused or did not confirm")
        self.unsendable = counter(
            "unsendable", "copies that fit no frame, or whose content makes the broker close a channel"
        )
        self.given_back = counter("given_back", "copies given back uncounted", "reason")
        self.submission_taken = counter("submission_taken", "messages of submit queues that were carried out", "broker")
        self.submission_refused = counter(
            "submission_refused", "messages of submit queues that were refused", "broker", "reason"
        )
        self.streams_cut = counter("streams_cut", "consumers' streams ended because nothing was read from them")
        self.in_flight = gauge("in_flight", "copies on their way to the broker, without a confirm yet")
        self.confirm_seconds = histogram("confirm_seconds", "publish to confirm", _SECONDS)
        self.publisher_connected = gauge("publisher_connected", "1: connected to the broker")
        self.certificate_expires_timestamp_seconds = gauge(
            "certificate_expires_timestamp_seconds",
            "when the certificate of [tls] becomes invalid, seconds since the epoch; 0: there is none",
        )
        self.publisher_blocked = gauge("publisher_blocked", "1: the broker blocks publishers")
        self.queue_depth = gauge("queue_depth", "messages ready in a queue, when it was last looked at", "queue")
        self.batch_operations = histogram("batch_operations", "operations in one transaction", _SIZES)
        self.commit_seconds = histogram("commit_seconds", "one transaction of the group commit", _SECONDS)
        self.commits_lost = counter("commits_lost", "outages after which a database lacked what it had answered before")
        self.call_seconds = histogram("call_seconds", "one RPC, as the server sees it", _SECONDS, "method", "code")
        self.login_failures = counter("login_failures", "calls without a valid key or token", "kind")
        self.connections_closed = counter("connections_closed", "connections closed because they showed no key")
        self.leases_held = gauge("leases_held", "shards whose leases this server holds")
        self.servers_alive = gauge("servers_alive", "servers with a heartbeat, this one included")
        self.messages_prepared = gauge("messages_prepared", "messages PREPARED, by the last count", "topic")
        self.messages_undecided = gauge("messages_undecided", "of these, older than their transaction time", "topic")
        self.messages_check_failed = gauge("messages_check_failed", "messages CHECK_FAILED: a human decides", "topic")
        self.deliveries_scheduled = gauge(
            "deliveries_scheduled", "deliveries SCHEDULED, delayed included", "topic", "app"
        )
        self.backlog = gauge("backlog", "of these, due or attempted and not acked yet", "topic", "app")
        self.deliveries_failed = gauge("deliveries_failed", "deliveries FAILED: a human reactivates", "topic", "app")
        self.deliveries_waiting = gauge(
            "deliveries_waiting", "deliveries WAITING for an earlier message of their order key", "topic", "app"
        )
        self.oldest_seconds = gauge("oldest_seconds", "age of the oldest, per state", "state", "topic", "app")
        self.streams_open = gauge("streams_open", "streams of consumers that are open")
        self.commit_waiting = gauge("commit_waiting", "operations that wait for a transaction of the group commit")
        self.pool_in_use = gauge("pool_in_use", "connections of a database's pool that are in use", "database")
        self.clock_ahead_seconds = gauge(
            "clock_ahead_seconds",
            "how far the center's time is ahead of a database's clock, which was set back",
            "database",
        )
        self.audit_rewound = gauge(
            "audit_rewound", "1: seals of the audit trail that this server saw are gone", "database"
        )
        self.build_info = gauge("build_info", "1; the label says which version this is", "version")
        self.duty_failures = gauge("duty_failures", "runs of a duty that failed in a row", "duty")

    def pair(self, catalog: Catalog, topic: int, subscription: SubscriptionNumber) -> tuple[str, str]:
        """Label values for a topic and a subscriber, by number; within the limit on series."""
        return self.names.of(*_names_of(catalog, topic, subscription))


def _names_of(catalog: Catalog, topic: int, subscription: SubscriptionNumber) -> tuple[str, str]:
    """app "": it is about no subscriber."""
    known, subscribed = catalog.topics.get(topic), catalog.subscriptions.get(subscription)
    return known.name if known else str(topic), catalog.apps[subscribed.app].id if subscribed else ""


def count_each(counter: Counter, labels: Iterable[tuple[str, ...]]) -> None:
    """Increment the counter once per item; labels are looked up once per distinct value, not per item."""
    for values, times in Tally(labels).items():
        counter.labels(*values).inc(times)


METRICS = Metrics(CollectorRegistry())
