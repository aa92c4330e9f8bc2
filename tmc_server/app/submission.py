"""The readers of submit queues that this configuration has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from tmc_server.app.maintenance import CannotStart
from tmc_server.config import Config
from tmc_server.domain.numbers import Shard
from tmc_server.submission.intake import Desk
from tmc_server.submission.sharing import Counter, RaiseAlert, Reader, Sharing


def submission(
    config: Config,
    desk: Desk,
    loop: asyncio.AbstractEventLoop,
    held: Callable[[], Collection[Shard]],
    raise_alert: RaiseAlert,
) -> Sharing | None:
    """held: the shards that this server looks after.  Returns None: messages come over gRPC only. Raises CannotStart."""
    by_shard: list[Reader] = []
    by_broker: list[Reader] = []
    try:
        if config.submission.rabbitmq:
            from tmc_server.submission.rabbitmq import RabbitReader

            url, kind = config.rabbitmq.url.get_secret_value(), config.rabbitmq.queue_type
            by_shard.append(RabbitReader(url, kind, loop, Counter("rabbitmq", desk, raise_alert).open_intake))
        if config.submission.kafka:
            from tmc_server.submission.kafka import KafkaReader

            by_broker.append(
                KafkaReader(config.kafka.librdkafka, loop, Counter("kafka", desk, raise_alert).open_intake)
            )
    except ModuleNotFoundError as exc:
        extra = "kafka" if exc.name == "confluent_kafka" else "rabbitmq"
        raise CannotStart(f"[submission] needs {exc.name}: install tmc-center[{extra}].") from exc
    return Sharing(desk.catalog, held, by_shard, by_broker) if by_shard or by_broker else None
