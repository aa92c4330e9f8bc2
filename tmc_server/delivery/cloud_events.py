"""A copy as a CloudEvent: what a webhook posts, and a record of Kafka carries.

Source: CloudEvents 1.0.2, JSON format; Distributed Tracing extension.
"""

from __future__ import annotations

import json
from contextlib import suppress

import msgspec

from tmc_common.cloud_events import VERSION
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ids import MessageId
from tmc_server.domain.ports.delivery import Copy

_TRACE = ("traceparent", "tracestate")  # attributes of CloudEvents have these names, too


def attributes_of(copy: Copy, catalog: Catalog) -> dict[str, str]:
    """Return what identifies a copy, by the names of attributes, without the version and the content type."""
    subscription = catalog.subscriptions[copy.subscription]
    return {
        "id": str(MessageId(copy.topic, copy.producer, copy.shard, copy.number)),
        "source": f"/tmc/{catalog.apps[copy.producer].id}",
        "type": catalog.topics[copy.topic].name,
        "subject": copy.key,
        "tmcattempt": str(copy.attempt),
        "tmcsubscriber": f"{catalog.apps[subscription.app].id}.{subscription.tag}",
    }


def json_event(copy: Copy, catalog: Catalog) -> dict[str, object]:
    """Return a copy as a CloudEvent in its JSON form."""
    event: dict[str, object] = {"specversion": VERSION, **attributes_of(copy, catalog)}
    event["tmcattempt"] = int(copy.attempt)
    if copy.content_type:
        event["datacontenttype"] = copy.content_type
    event |= {name: text for name, text in copy.headers.items() if name in _TRACE}
    others = {name: text for name, text in copy.headers.items() if name not in _TRACE}
    if others:
        event["tmcheaders"] = json.dumps(others, ensure_ascii=False)
    data = _json_data(copy)
    return event | ({"data": data} if data is not None else {"data_base64": copy.body})


def _json_data(copy: Copy) -> msgspec.Raw | None:
    """The body as it is, if it is what its content type says. None: it is no JSON."""
    kind = copy.content_type.partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            msgspec.json.decode(copy.body)
            return msgspec.Raw(copy.body)
    return None
