"""The errors of librdkafka that are about a record, and a safe way to read headers. Needs confluent_kafka."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from confluent_kafka import KafkaError

TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}
"""A record, or the whole batch that it is in: sent alone, the others are taken."""
NEVER = {KafkaError.INVALID_MSG, KafkaError.INVALID_RECORD, KafkaError.TOPIC_EXCEPTION, KafkaError._INVALID_ARG}
"""About the record or the name of its topic: trying again does not help. Everything else may be mended."""
ALONE = {"linger.ms": 0, "batch.num.messages": 1}
"""Settings of a producer that sends one record at a time."""


def headers_of(record: Any) -> Sequence[tuple[str, bytes | None]] | None:
    """Return the headers of a record of confluent_kafka. None: it cannot read them, e.g. a name that is not UTF-8.

    Call it once for each record: a second call crashes the process.
    """
    try:
        return record.headers() or ()
    except (SystemError, UnicodeError):  # from within the library
        return None
