"""Messages as CloudEvents in the binary mode of Kafka; docs/wire.md describes the records for their readers.

Source: CloudEvents 1.0.2, Kafka protocol binding.
"""

from __future__ import annotations

from collections.abc import Mapping

from tmc_common.headers import PREFIX

VERSION = "1.0"
KAFKA_PREFIX = "ce_"
CONTENT_TYPE = "content-type"


def record_headers(attributes: Mapping[str, str], content_type: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a record: the event's attributes, its content type, and the message's own headers.

    attributes: all but specversion. Headers of the message that would be taken for an attribute are sent under PREFIX.
    """
    event = {KAFKA_PREFIX + name: text for name, text in {"specversion": VERSION, **attributes}.items()}
    own = {PREFIX + name if _is_the_events(name) else name: text for name, text in headers.items()}
    kind = {CONTENT_TYPE: content_type} if content_type else {}  # CloudEvents take no empty one
    return {**own, **event, **kind}


def read_record_headers(headers: Mapping[str, str]) -> tuple[dict[str, str], str, dict[str, str]]:
    """Do the reverse of `record_headers`. Returns: attributes without their prefix, content type, the message's own headers."""
    attributes: dict[str, str] = {}
    own: dict[str, str] = {}
    for name, text in headers.items():
        if name.startswith(KAFKA_PREFIX):
            attributes[name.removeprefix(KAFKA_PREFIX)] = text
        elif name != CONTENT_TYPE:
            own[name.removeprefix(PREFIX)] = text
    return attributes, headers.get(CONTENT_TYPE, ""), own


def _is_the_events(name: str) -> bool:
    lowered = name.lower()
    return lowered.startswith(KAFKA_PREFIX) or lowered == CONTENT_TYPE
