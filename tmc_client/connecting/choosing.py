"""Chooses how the center is reached by the scheme of its address."""

from __future__ import annotations

from dataclasses import replace

from tmc_client import errors
from tmc_client.connecting.connection import Caller, Connection, Identity, Tls
from tmc_client.connecting.submit_queue import Carrier, SubmitQueue
from tmc_client.extras import needed_by
from tmc_common.submission import DEAD

_THROUGH = "+submit://"
_BROKERS = ("amqp", "amqps", "kafka")
_DEFAULT_TAG = "default"


def caller_of(address: str, identity: Identity, tls: Tls | None, *, insecure: bool, proxy: str | None) -> Caller:
    """address: see tmc_client.connect. Raises InvalidRequest, ValueError; MissingExtra."""
    broker, is_queue, rest = address.partition(_THROUGH)
    if not is_queue:
        return Connection(address, identity, tls, insecure=insecure, proxy=proxy)
    if tls is not None or proxy is not None:
        raise errors.InvalidRequest(
            "tls= and proxy= are of connections over gRPC: a broker's TLS is in its address, amqps+submit:// or"
            " security.protocol=SSL."
        )
    if broker not in _BROKERS:
        raise errors.InvalidRequest(f"{broker}{_THROUGH} is no submit queue: give one of {', '.join(_BROKERS)}.")
    if identity.tag == DEAD:
        raise errors.InvalidRequest(f"tag={DEAD!r} is no environment: that queue has what was refused.", field="tag")
    identity = replace(identity, tag=identity.tag or _DEFAULT_TAG)  # a queue is of one environment
    return SubmitQueue(address, identity, _carrier_of(broker, f"{broker}://{rest}", identity))


def _carrier_of(broker: str, url: str, identity: Identity) -> Carrier:
    """Raises InvalidRequest, MissingExtra."""
    try:
        with needed_by(f"{broker}{_THROUGH}"):
            if broker == "kafka":
                from tmc_client.connecting.kafka_carrier import KafkaCarrier

                return KafkaCarrier(url, identity.app, identity.tag)
            from tmc_client.connecting.amqp_carrier import AmqpCarrier

            return AmqpCarrier(url, identity.app, identity.tag)
    except ValueError as exc:
        why = exc if broker == "kafka" else "give amqp+submit://USER:PASSWORD@HOST:PORT/VHOST, with %2F for a slash"
        raise errors.InvalidRequest(f"This is no address of a broker: {why}.") from None
