"""Find archived messages, to print them or to publish them again as new messages."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from tmc_client import Center
from tmc_client.producing.producer import publish_request, wait
from tmc_common.headers import ORDER_KEY, REPLAY_KEYS, REPLAY_OF, REPLAY_TO
from tmc_pipeline.archive.contents import Archive, closed_since, is_among, subscriber_names
from tmc_pipeline.errors import ArchiveDamaged, CannotRun, translated
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ids import MessageId, created_ms
from tmc_server.domain.manifest import Chain
from tmc_server.domain.message import MessageState

_PATIENCE = timedelta(seconds=20)


def wanted_ids(texts: Sequence[str]) -> list[MessageId]:
    """Raises CannotRun: a text is no message id."""
    found = [(text, MessageId.parse(text)) for text in texts]
    bad = [text for text, parsed in found if parsed is None]
    if bad:
        raise CannotRun(f"{bad[0]!r} is no message id: copy it whole, as in 3-1-07-123456789.")
    return [parsed for _, parsed in found if parsed is not None]


def topic_names(chain: Chain, ids: Sequence[MessageId]) -> set[str]:
    """Names that the folders of their topics may have: a topic that was removed from the catalog lost its name."""
    numbers = {each.topic for each in ids}
    names = chain.names["topics"]
    return {f"topic-{number}" for number in numbers} | {str(names.get(str(number), "")) for number in numbers}


def with_ids(messages: DataFrame, ids: Sequence[MessageId]) -> DataFrame:
    """Rows of ARCHIVED whose shard and id are among these."""
    return messages.where(is_among(ids))


def with_key(messages: DataFrame, topic: str, key: str) -> DataFrame:
    """Rows of ARCHIVED with that topic and message key."""
    return messages.where((f.col("topic") == topic) & (f.col("message_key") == key))


class Restoring:
    """Reads only folders that may contain the wanted messages: of their topics, and of days since they were prepared.

    Damage elsewhere is ignored; if not everything was found, an unreadable manifest is reported as the reason.
    """

    def __init__(self, archive: Archive, skip_missing: bool = False) -> None:
        self._archive = archive
        self._skip_missing = skip_missing

    def by_id(self, ids: Sequence[MessageId]) -> Iterator[dict[str, Any]]:
        """Messages as JSON values; the body in base64, and as text if it is text."""
        with self._archive.folder.read_by():
            chain, unreadable = self._archive.readable()
            recent = closed_since(min((created_ms(each.number) for each in ids), default=0))
            wanted = topic_names(chain, ids)
            places = [part for part in chain.partitions if part.place.topic in wanted and recent(part)]
            found = list(self._shown(with_ids(self._archive.messages(places, self._skip_missing), ids), chain))
        return self._complete(found, len({each["id"] for each in found}) == len(set(ids)), unreadable)

    def by_key(self, topic: str, key: str) -> Iterator[dict[str, Any]]:
        """Restore by key, as by_id does."""
        with self._archive.folder.read_by():
            chain, unreadable = self._archive.readable()
            places = [part for part in chain.partitions if part.place.topic == topic]
            found = list(self._shown(with_key(self._archive.messages(places, self._skip_missing), topic, key), chain))
        return self._complete(found, bool(found), unreadable)

    def _complete(
        self, found: list[dict[str, Any]], complete: bool, unreadable: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        if unreadable and not complete and not self._skip_missing:
            raise ArchiveDamaged(f"Not everything was found, and {unreadable[0]}")
        return iter(found)

    def _shown(self, messages: DataFrame, chain: Chain) -> Iterator[dict[str, Any]]:
        subscribers = subscriber_names(chain)
        apps = {int(number): str(name) for number, name in chain.names["apps"].items()}
        with translated():
            rows = messages.orderBy("id").collect()
        for row in rows:
            yield _as_values(row, subscribers, apps)


def _as_values(row: Any, subscribers: dict[int, tuple[str, str]], apps: dict[int, str]) -> dict[str, Any]:
    body = bytes(row.body)
    return {
        "id": str(MessageId(row.topic_no, row.producer_no, row.shard, row.id)),
        "topic": row.topic,
        "key": row.message_key,
        "producer": apps.get(row.producer_no, f"app-{row.producer_no}"),
        "tag": row.producer_tag,
        "state": MessageState(row.state).name,
        "content_type": row.content_type,
        "headers": json.loads(row.headers or "{}"),
        "created_ms": row.created_ms,
        "decided_ms": row.decided_ms,
        "closed_ms": row.closed_ms,
        "erased": None if row.erased_ms is None else {"at_ms": row.erased_ms, "reason": row.erased_reason},
        "consumptions": [
            {
                "subscriber": subscribers.get(each.subscription_no, ("", f"subscription-{each.subscription_no}"))[1],
                "state": ConsumptionState(each.state).name,
                "attempt": each.attempt,
                "closed_ms": each.closed_ms,
            }
            for each in row.consumptions
        ],
        "attempts": [
            {"attempt": each.attempt, "at_ms": each.at_ms, "error": each.error} for each in row.attempts or ()
        ],
        "body_base64": base64.b64encode(body).decode(),
        "body": _text(body),
    }


def _text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def replay(message: dict[str, Any], center: Center) -> str:
    """Publish an archived message again, as a new one to all current subscribers. Returns: the new id.

    Its key and attempt id are derived from the old id, so repeating a replay sends nothing twice. Inboxes see the new
    id, so handlers run. center: connected as the message's producer, with an operator's token.
    Raises CannotRun, tmc_client.TmcError.
    """
    old = message["id"]
    if message["state"] != MessageState.COMMITTED.name:
        raise CannotRun(f"{old} was rolled back: nobody may see it.")
    if message["erased"]:
        raise CannotRun(f"{old} cannot be sent again: its content was erased ({message['erased']['reason']}).")
    headers = {**message["headers"], REPLAY_OF: old}
    order_key = headers.pop(ORDER_KEY, "")
    headers.pop(REPLAY_TO, None)  # this one is for all subscribers
    attempt = hashlib.sha256(f"replay of {old}".encode()).digest()[:16]
    body = base64.b64decode(message["body_base64"])
    request = publish_request(
        message["topic"],
        body,
        key=f"{REPLAY_KEYS}{old}",
        order_key=order_key,
        headers=headers,
        attempt_id=attempt,
        is_replay=True,
    )
    request.content_type = message["content_type"]
    return str(wait(center.producer.publish(request, _PATIENCE), _PATIENCE).message_id)
