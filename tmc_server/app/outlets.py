"""Where copies go in this configuration: built-in streams or RabbitMQ queues, and forwarders."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from tmc_common.addresses import HostPort, each_host
from tmc_common.eventlog import EventLog
from tmc_common.plugins import installed
from tmc_server.app.maintenance import CannotStart
from tmc_server.config import Config
from tmc_server.delivery.answers import CopyAnswers
from tmc_server.delivery.routing import RoutingOutlet
from tmc_server.delivery.spans import PublishSpans
from tmc_server.delivery.stream import StreamOutlet
from tmc_server.delivery.webhook import WebhookForwarder
from tmc_server.domain.catalog import WEBHOOK, WEBHOOK_BATCH, Forward
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.egress import Egress
from tmc_server.domain.numbers import NO_SUBSCRIPTION, SubscriptionNumber
from tmc_server.domain.ports.alerts import AlertOutbox
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.delivery import BrokerAddress, Copy, ForwarderUnavailable, Outlet, SharedProgress
from tmc_server.duties.periodic import Periodic
from tmc_server.outgoing import client_tls

log = EventLog("tmc.app")

ENTRY_POINTS = "tmc.forwarders"
_EPISODE_MINUTES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raised:
    """An alert to write. slot: the minute that it begins in."""

    kind: str
    topic: int
    subscription: SubscriptionNumber
    slot: int


def _slot(minutes: int) -> int:
    minute = int(time.time() // 60)
    return minute - minute % minutes


class Outlets:
    """All outlets for copies, started and stopped together.

    wake: called when there is room for due copies.  on_copies: see RunMode.
    """

    def __init__(
        self,
        config: Config,
        loop: asyncio.AbstractEventLoop,
        catalog: CatalogSource,
        alerts: AlertOutbox,
        progress: SharedProgress,
        wake: Callable[[], None],
        on_copies: Callable[[Sequence[Copy]], None] | None = None,
    ) -> None:
        self._catalog = catalog
        self._alerts = alerts
        self._progress = progress
        self._loop = loop
        self.answers = CopyAnswers(loop, catalog)
        self.answers.raise_alert = self.raise_alert
        self._raised: dict[_Raised, str] = {}
        self._told: set[_Raised] = set()
        self.streams: StreamOutlet | None = None
        known: dict[str, Outlet] = {}
        self.broker: BrokerAddress | None = None
        self._rabbit: Any = None
        self.queues: Any = None
        self._declaring: Periodic | None = None
        self._exchanges: Any = None
        url = config.rabbitmq.url.get_secret_value()
        if url:
            known["rabbitmq"] = self._rabbit = self._make_rabbit(config, url, wake)
        self._forwarders = self._make_forwarders(config, wake)
        consumers: Outlet
        if config.delivery.kind == "rabbitmq":
            consumers = known["rabbitmq"]
            self.broker = _broker_address(url, config.rabbitmq.consumer_address)
        else:
            consumers = self.streams = StreamOutlet(
                loop, self.answers.give_back, wake, on_copies=on_copies, spans=PublishSpans(catalog)
            )
        self.outlet = RoutingOutlet(
            catalog, consumers, known | self._forwarders, self.unforwardable, self.answers.unstored
        )
        self.forwarder_kinds = sorted(known | self._forwarders)

    def _make_rabbit(self, config: Config, url: str, wake: Callable[[], None]) -> Any:
        try:
            from tmc_server.delivery.rabbitmq import RabbitOutlet
            from tmc_server.delivery.rabbitmq_exchanges import RabbitExchanges
            from tmc_server.delivery.rabbitmq_queues import RabbitQueues
        except ModuleNotFoundError as exc:
            raise CannotStart(f"[rabbitmq] needs {exc.name}: install tmc-center[rabbitmq].") from exc
        limits = config.rabbitmq
        self._exchanges = RabbitExchanges(url)
        self.queues = RabbitQueues(
            url, self._catalog, limits.queue_type, self.raise_alert, wake, single_node=limits.single_node
        )
        return RabbitOutlet(
            url=url,
            catalog=self._catalog,
            queues=self.queues,
            answers=self.answers,
            wake=wake,
            raise_alert=self.raise_alert,
            progress=self._progress,
            window=limits.window,
            signatures=config.delivery.signatures,
        )

    def _make_forwarders(self, config: Config, wake: Callable[[], None]) -> dict[str, Outlet]:
        """Installed forwarders that this machine can load; each is made as `factory(catalog, answers, wake)`."""
        made = _webhooks(config, self._catalog, self.answers, wake)
        ours = {"kafka": [config.kafka.librdkafka]}
        for name, entry in installed(ENTRY_POINTS).items():
            try:
                made[name] = entry.load()(self._catalog, self.answers, wake, *ours.get(name, []))
            except (ImportError, ForwarderUnavailable) as exc:
                log.debug("forwarder_missing", "this server forwards nothing to %s: %s", name, exc)
        return made

    def examine(self, forward: Forward) -> None:
        """See domain.ports.delivery.Forwarding. Forwarders of other kinds may have an `examine(forward)` of their own."""
        if forward.kind == "rabbitmq":
            self._exchanges.examine(forward)
            return
        examine = getattr(self._forwarders.get(forward.kind), "examine", None)
        if examine is not None:
            examine(forward)

    def raise_alert(self, kind: str, subscription: SubscriptionNumber, detail: str, every_minutes: int = 1) -> None:
        """Alert the owner of a subscription, once in that time over all servers. From any thread; written by a duty."""
        topic = self._catalog.current.subscriptions[subscription].topic
        self._raised.setdefault(
            _Raised(kind=kind, topic=topic, subscription=subscription, slot=_slot(every_minutes)), detail
        )

    def raise_topic_alert(self, kind: str, topic: int, detail: str, every_minutes: int = 1) -> None:
        """Alert the owner of a topic, in the same way."""
        self._raised.setdefault(
            _Raised(kind=kind, topic=topic, subscription=NO_SUBSCRIPTION, slot=_slot(every_minutes)), detail
        )

    def _write_raised(self) -> bool:
        for key, detail in list(self._raised.items()):
            if key not in self._told:
                self._alerts.add(key.kind, key.topic, key.subscription, key.slot, detail)
                self._told.add(key)
            del self._raised[key]
        self._told = {key for key in self._told if key.slot >= _slot(1) - 2 * _EPISODE_MINUTES}
        return False

    def abandoned(self, subscription: SubscriptionNumber, look: QueueLook) -> None:
        """Alert the owner: a queue holds copies, but has no consumer."""
        detail = f"{look.messages} messages wait in a queue that nobody reads"
        self.raise_alert("no consumer", subscription, detail, _EPISODE_MINUTES)

    def unacked_near_limit(self, subscription: SubscriptionNumber, detail: str) -> None:
        """Alert the owner: producers will be refused."""
        self.raise_alert("unacked near limit", subscription, detail, _EPISODE_MINUTES)

    def unforwardable(self, subscription: SubscriptionNumber, kind: str) -> None:
        """Alert the owner: this server holds the shard, but has no such forwarder."""
        detail = (
            f"the server that looks after these messages cannot forward to {kind!r}: install and configure that on all "
            "servers; until then they wait"
        )
        self.raise_alert("no forwarder", subscription, detail, _EPISODE_MINUTES)

    def duties(self) -> list[Periodic]:
        alerts = Periodic("raising", self._write_raised, 1.0)
        if self.queues is None:
            return [alerts]
        self._declaring = Periodic("queues", self.queues.run_once, 1.0)
        return [alerts, self._declaring, Periodic("progress", self._rabbit.share_progress, 1.0)]

    def catalog_changed(self) -> None:
        """There may be queues to declare."""
        if self._declaring is not None:
            self._declaring.wake()

    def start(self) -> None:
        """Start the outlets, queues first if the broker answers: a publish to a missing queue costs a pause."""
        if self.queues is not None:
            try:
                self.queues.run_once()
            except Exception as exc:  # noqa: BLE001 - the broker may come later; the duty tries again
                log.warning("queues_delayed", "queues are declared later: %r", exc)
            self._rabbit.start()
        for forwarder in set(self._forwarders.values()):
            if hasattr(forwarder, "start"):
                forwarder.start()

    def finish(self, subscriptions: frozenset[SubscriptionNumber]) -> None:
        """End the streams of these subscriptions. From any thread."""
        if self.streams is not None:
            self._loop.call_soon_threadsafe(self.streams.finish, subscriptions)

    def stop(self) -> bool:
        """Wait for copies in flight. Returns: True if none has to be handed over again. Blocks."""
        clean = self._rabbit.stop() if self._rabbit is not None else True
        for forwarder in set(self._forwarders.values()):
            if hasattr(forwarder, "stop"):
                clean = forwarder.stop() and clean
        if self.queues is not None:
            self.queues.close()
        return clean and self.streams is None


def _webhooks(
    config: Config, catalog: CatalogSource, answers: CopyAnswers, wake: Callable[[], None]
) -> dict[str, Outlet]:
    """Raises CannotStart: the authority cannot be read."""
    if not config.webhooks.allow:
        return {}
    try:
        tls = client_tls(config.webhooks.authority)
    except (OSError, ssl.SSLError) as exc:
        raise CannotStart(f"[webhooks] authority cannot be read: {exc}.") from exc
    forwarder = WebhookForwarder(catalog, answers, wake, Egress(config.webhooks.allow), tls)
    return {WEBHOOK: forwarder, WEBHOOK_BATCH: forwarder}


def _broker_address(url: str, advertised: str) -> BrokerAddress:
    each = [urlsplit(one) for one in each_host(url)]
    scheme, path = each[0].scheme, each[0].path
    usual = 5671 if scheme == "amqps" else 5672
    nodes = HostPort.parse_all(advertised) if advertised else [_node(parts, usual) for parts in each]
    return BrokerAddress(nodes=nodes, virtual_host=unquote(path[1:]) or "/", tls=scheme == "amqps")


def _node(parts: SplitResult, usual_port: int) -> HostPort:
    return HostPort(parts.hostname or "127.0.0.1", parts.port or usual_port)
