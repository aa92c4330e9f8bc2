"""A copy as an AMQP message: its properties, and the name that matches a returned message to it."""

from __future__ import annotations

from pika.spec import BasicProperties

from tmc_common import signatures
from tmc_common.headers import to_wire
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import MessageNumber, Shard
from tmc_server.domain.ports.delivery import Copy

Digests = dict[tuple[Shard, MessageNumber], bytes]
"""SHA-256 of bodies, by the shard and number of their messages: subscriptions of one message share it."""


def properties_of(copy: Copy, catalog: Catalog) -> BasicProperties:
    """The properties of a copy. User headers cannot reach the broker's own names, see tmc_common.headers."""
    subscription = catalog.subscriptions[copy.subscription]
    return BasicProperties(
        content_type=copy.content_type,
        headers={
            **to_wire(copy.headers),
            "tmc-key": copy.key,
            "tmc-attempt": copy.attempt,
            "tmc-subscriber": f"{catalog.apps[subscription.app].id}.{subscription.tag}",
            "tmc-interval-ms": subscription.policy.delay_after_ms(1),
        },
        delivery_mode=2,
        message_id=str(MessageId(copy.topic, copy.producer, copy.shard, copy.number)),
        type=catalog.topics[copy.topic].name,
        app_id=catalog.apps[copy.producer].id,
    )


def sign_copy(copy: Copy, properties: BasicProperties, secret: bytes, digests: Digests) -> None:
    """Add the signature of what these properties and the body say. digests: of this batch; grows."""
    digest = digests.get((copy.shard, copy.number))
    if digest is None:
        digest = digests[copy.shard, copy.number] = signatures.body_digest(copy.body)
    headers = properties.headers
    signed = signatures.content(
        message_id=properties.message_id,
        attempt=copy.attempt,
        topic=properties.type,
        key=copy.key,
        content_type=copy.content_type,
        producer=properties.app_id,
        subscriber=headers["tmc-subscriber"],
        interval_ms=headers["tmc-interval-ms"],
        body_digest=digest,
        headers=copy.headers,
    )
    headers[signatures.HEADER] = signatures.sign(secret, signed)


def name_of(key: str, properties: BasicProperties) -> tuple[object, ...]:
    """Identify a copy among those in flight: several subscriptions may forward one message to the same exchange."""
    return key, properties.message_id, properties.headers["tmc-subscriber"], properties.headers["tmc-attempt"]
