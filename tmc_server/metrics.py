"""Every metric of the server, as one list; docs/telemetry.md is compared with it. Labels are bounded: never a message id."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 400, 1000)


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
        self.prepared = counter("prepared", "messages stored by Prepare", "topic")
        self.submitted = counter("submitted", "messages submitted, published or committed by a check", "topic")
        self.rolled_back = counter("rolled_back", "messages rolled back, by their producer or by a check", "topic")
        self.acked = counter("acked", "acks stored", "topic", "app")
        self.nacked = counter("nacked", "failed tries stored", "topic", "app")
        self.failed = counter("failed", "deliveries given up by the redelivering duty")
        self.redelivered = counter("redelivered", "due deliveries handed over by the redelivering duty")
        self.removed = counter("removed", "closed messages removed by the retention duty")
        self.held = counter("held", "due deliveries that waited for an earlier copy in their queue")
        self.rescued = counter("rescued", "deliveries of a server that is gone, made due again")
        self.checked = counter("checked", "answers to checks", "topic", "verdict", "reason")
        self.check_failed = counter("check_failed", "messages that nobody knew about at the limit of their checks")
        self.check_seconds = histogram("check_seconds", "one page of questions, asked and answered", _SECONDS, "kind")
        self.first_check_late_seconds = histogram(
            "first_check_late_seconds", "from the time a first check is due to its begin", _SECONDS
        )
        self.published = counter("published", "copies published to the broker")
        self.returned = counter("returned", "copies that the broker returned, refused or did not confirm")
        self.unsendable = counter(
            "unsendable", "copies that fit no frame, or whose content makes the broker close a channel"
        )
        self.given_back = counter("given_back", "copies given back uncounted", "reason")
        self.streams_cut = counter("streams_cut", "consumers' streams ended because nothing was read from them")
        self.in_flight = gauge("in_flight", "copies on their way to the broker, without a confirm yet")
        self.confirm_seconds = histogram("confirm_seconds", "publish to confirm", _SECONDS)
        self.publisher_connected = gauge("publisher_connected", "1: connected to the broker")
        self.publisher_blocked = gauge("publisher_blocked", "1: the broker blocks publishers")
        self.queue_depth = gauge("queue_depth", "messages ready in a queue, when it was last looked at", "queue")
        self.batch_operations = histogram("batch_operations", "operations in one transaction", _SIZES)
        self.commit_seconds = histogram("commit_seconds", "one transaction of the group commit", _SECONDS)
        self.call_seconds = histogram("call_seconds", "one RPC, as the server sees it", _SECONDS, "method", "code")
        self.leases_held = gauge("leases_held", "shards whose leases this server holds")
        self.servers_alive = gauge("servers_alive", "servers with a heartbeat, this one included")
        self.duty_failures = gauge("duty_failures", "runs of a duty that failed in a row", "duty")


def count_each(counter: Counter, labels: Iterable[tuple[str, ...]]) -> None:
    """One more for each of these label values; a batch costs a look-up per different value, not per item."""
    for values, times in Tally(labels).items():
        counter.labels(*values).inc(times)


METRICS = Metrics(CollectorRegistry())
