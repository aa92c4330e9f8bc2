"""From rows of the catalog's tables to records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import sqlalchemy as sa

from tmc_common.eventlog import EventLog
from tmc_server.domain.alerts import Silence
from tmc_server.domain.catalog import App, DeliveryKeys, Forward, SubmitQueue, Subscription, TagKeys, Topic
from tmc_server.domain.checks import CheckPolicy, CheckTarget
from tmc_server.domain.ordering import OrderMode
from tmc_server.domain.retry import RetryPolicy
from tmc_server.errors import StoreUnavailable
from tmc_server.store.records import record_of
from tmc_server.store.tables import app_key, submit_queue

log = EventLog("tmc.catalog")

Made = TypeVar("Made")


def read_or_kept(name: str, read: Callable[[Any], Made], row: Any, kept: Made | None) -> Made:
    """Return what a row says; of one that cannot be read, e.g. of a newer version, what it said before.

    A row that this server never read may be a subscription: without it, submits would forget the subscriber. So the whole
    copy stays as it was, and grows stale. Raises StoreUnavailable, which names the row.
    """
    try:
        return read(row)
    except (ValueError, TypeError, KeyError) as exc:
        known = "it stays as it was" if kept is not None else "nothing of the catalog is read until it is corrected"
        log.error("catalog_row_unreadable", "the row of %s cannot be read, %s: %s", name, known, exc)
        if kept is None:
            raise StoreUnavailable(f"The row of {name} in the catalog cannot be read ({exc}): correct it.") from exc
        return kept


def tag_keys(connection: sa.Connection) -> dict[int, tuple[TagKeys, ...]]:
    """Return the keys of environments by app number."""
    found: dict[int, tuple[TagKeys, ...]] = {}
    for row in connection.execute(sa.select(app_key).order_by(app_key.c.tag)):
        found[row.app_no] = (*found.get(row.app_no, ()), TagKeys(row.tag, _hashes(row._mapping)))
    return found


def _hashes(values: Any) -> tuple[bytes, ...]:
    """Newest first."""
    return tuple(h for h in (values["key_hash"], values["old_key_hash"]) if h is not None)


def submit_queues(connection: sa.Connection) -> dict[int, tuple[SubmitQueue, ...]]:
    """Return the submit queues by app number."""
    found: dict[int, tuple[SubmitQueue, ...]] = {}
    for row in connection.execute(sa.select(submit_queue).order_by(submit_queue.c.tag)):
        secrets = tuple(bytes.fromhex(text) for text in (row.secret, row.old_secret) if text)
        found[row.app_no] = (*found.get(row.app_no, ()), SubmitQueue(tag=row.tag, secrets=secrets))
    return found


def app_of(row: Any, keys: tuple[TagKeys, ...] = (), queues: tuple[SubmitQueue, ...] = ()) -> App:
    return record_of(App, row, number=row.app_no, key_hashes=_hashes(row._mapping), tag_keys=keys, submit_queues=queues)


def topic_of(row: Any, targets: Mapping[str, CheckTarget] | None = None) -> Topic:
    """targets: those that were set; without any the topic has the usual one."""
    retry = record_of(RetryPolicy, row, "check_")
    checks = CheckPolicy(targets, retry) if targets else CheckPolicy(retry=retry)
    return record_of(Topic, row, number=row.topic_no, owner=row.owner_no, checks=checks)


def target_of(row: Any) -> CheckTarget:
    return record_of(CheckTarget, row, options=json.loads(row.options))


def forward_of(row: Any) -> Forward | None:
    return record_of(Forward, row, "forward_") if row.forward_kind else None


def subscription_of(row: Any) -> Subscription:
    return record_of(
        Subscription,
        row,
        number=row.subscription_no,
        topic=row.topic_no,
        app=row.app_no,
        policy=record_of(RetryPolicy, row),
        forward=forward_of(row),
        keys=_delivery_keys(row),
        order=OrderMode(row.order_mode),
    )


def _delivery_keys(row: Any) -> DeliveryKeys | None:
    if not row.delivery_key:
        return None
    other = bytes.fromhex(row.other_key) if row.other_key else None
    return DeliveryKeys(signing=bytes.fromhex(row.delivery_key), other=other)


def silence_of(row: Any) -> Silence:
    return record_of(Silence, row, topic=row.topic_no, subscription=row.subscription_no)
