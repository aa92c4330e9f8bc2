"""The format of messages in submit queues; docs/submit-queues.md describes it for clients.

A step of a message (prepare, submit, roll back, publish) is a CloudEvent in binary mode: its attributes are headers, its
data is the body, untouched. Other headers are the message's own.
Source: CloudEvents 1.0.2, AMQP and Kafka protocol bindings. RabbitMQ's headers are named as the first of these say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from tmc_common.cloud_events import KAFKA_PREFIX
from tmc_common.headers import PREFIX, to_wire
from tmc_common.signatures import netstring

QUEUES = "tmc.submit"
EXCHANGE = QUEUES
"""The exchange of RabbitMQ that routes APP.TAG to the queue. Its topic permissions limit an app to its own."""
REPLIES = "tmc.reply"
DIRECT_REPLIES = "amq.rabbitmq.reply-to"
"""RabbitMQ replaces this name by one that only the connection can read which it comes from."""
DEAD = "dead"
"""In place of a tag: the queue of what was refused."""

_CONTENT_TYPE = "content-type"
AMQP_PREFIX = "cloudEvents:"
PREFIXES = (AMQP_PREFIX, KAFKA_PREFIX, "cloudEvents_", "ce-")
"""Headers that begin so are attributes. The binding for AMQP allows two prefixes, and HTTP's is the usual mistake."""

# Attributes of CloudEvents.
SPECVERSION, ID, SOURCE, TYPE, SUBJECT = "specversion", "id", "source", "type", "subject"
CONTENT_TYPE = "datacontenttype"
# Extensions, see docs/submit-queues.md.
OPERATION, LEDGER_ID, ORDER_KEY, DELAY_MS = "tmcop", "tmcledger", "tmcorderkey", "tmcdelay"
MESSAGE_ID = "tmcmessage"
CHECK_TARGET, TRANSACTION_MS = "tmctarget", "tmctime"
CHECK_ADDRESS, CHECK_LEDGER = "tmccheckaddress", "tmccheckledger"
REPLY_TO, CORRELATION = "tmcreplyto", "tmccorrelation"  # for brokers whose messages have no such properties
SIGNATURE = "tmcsignature"
CONTEXT = ("traceparent", "tracestate")
"""The trace that a step belongs to. Source: CloudEvents, Distributed Tracing extension."""

EXTENSIONS = frozenset(
    {
        OPERATION,
        MESSAGE_ID,
        LEDGER_ID,
        ORDER_KEY,
        DELAY_MS,
        CHECK_TARGET,
        TRANSACTION_MS,
        CHECK_ADDRESS,
        CHECK_LEDGER,
        REPLY_TO,
        CORRELATION,
        SIGNATURE,
    }
)
PREPARE, SUBMIT, ROLLBACK, PUBLISH, DESCRIBE = "prepare", "submit", "rollback", "publish", "describe"


def queue_of(app: str, tag: str) -> str:
    """Return the queue, or the topic of Kafka, from which the messages of an app in an environment are taken.

    >>> queue_of("orders", "prod")
    'tmc.submit.orders.prod'
    """
    return f"{QUEUES}.{app}.{tag}"


def routing_key_of(app: str, tag: str) -> str:
    """Return what leads to the queue through EXCHANGE.

    >>> routing_key_of("orders", "prod")
    'orders.prod'
    """
    return f"{app}.{tag}"


def dead_queue_of(app: str) -> str:
    """Return where an app's messages are put that were refused and whose sender wants no answer."""
    return queue_of(app, DEAD)


def replies_of(app: str) -> str:
    """Return the beginning of the names of queues that an app may have answers sent to."""
    return f"{REPLIES}.{app}."


def signed(
    queue: str, attributes: Mapping[str, str], content_type: str, body: bytes, headers: Mapping[str, str]
) -> bytes:
    """Return everything that is signed, as netstrings (`LENGTH:BYTES,`); no two messages share an encoding.

    The queue, the content type, SHA-256 of the body, the number of attributes, each attribute but the signature with its
    value, and each header with its value; names sorted by their bytes.  headers: as the user named them.
    """
    named = sorted(item for item in attributes.items() if item[0] != SIGNATURE)
    texts = [queue, content_type, hashlib.sha256(body).hexdigest(), str(len(named))]
    return b"".join(map(netstring, [*texts, *_flat(named), *_flat(sorted(headers.items()))]))


def _flat(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [text for pair in pairs for text in pair]


def own_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Rename the message's own headers that a broker, or the reader of the queue, would take for something else.

    >>> own_headers({"shop": "1", "x-trace": "2", "Content-Type": "3", "ce_id": "4"})
    {'shop': '1', 'tmc-user-x-trace': '2', 'tmc-user-Content-Type': '3', 'tmc-user-ce_id': '4'}
    """
    return to_wire({PREFIX + name if _is_read_otherwise(name) else name: text for name, text in headers.items()})


def _is_read_otherwise(name: str) -> bool:
    return name.lower() == _CONTENT_TYPE or any(name.lower().startswith(prefix.lower()) for prefix in PREFIXES)


def attribute_of(header: str) -> str:
    """Return the attribute that a header is; "": it is none.

    >>> attribute_of("ce_id"), attribute_of("cloudEvents:id"), attribute_of("shop")
    ('id', 'id', '')
    """
    for prefix in PREFIXES:
        if header.startswith(prefix):
            return header[len(prefix) :]
    return ""
