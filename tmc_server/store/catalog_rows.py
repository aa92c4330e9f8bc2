"""From rows of the catalog's tables to records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import sqlalchemy as sa

from tmc_common.eventlog import EventLog
from tmc_server.domain.alerts import Silence
from tmc_server.domain.catalog import App, DeliveryKeys, Forward, QueueMode, Subscription, TagKeys, Topic
from tmc_server.domain.checks import CheckPolicy, CheckTarget
from tmc_server.domain.numbers import SubscriptionNumber
from tmc_server.domain.ordering import OrderMode
from tmc_server.domain.retry import RetryKind, RetryPolicy
from tmc_server.errors import StoreUnavailable
from tmc_server.store.tables import app_key

log = EventLog("tmc.catalog")

Made = TypeVar("Made")


def read_or_kept(name: str, read: Callable[[Any], Made], row: Any, kept: Made | None) -> Made:
    """What a row says; of one that cannot be read, e.g. of a newer version, what it said before.

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


def sends_to(row: Any) -> Forward:
    return Forward(row.forward_kind, row.forward_target, row.forward_key)


def app_of(row: Any, keys: tuple[TagKeys, ...] = ()) -> App:
    return app_from(row._mapping, keys)


def tag_keys(connection: sa.Connection) -> dict[int, tuple[TagKeys, ...]]:
    """By app number."""
    found: dict[int, tuple[TagKeys, ...]] = {}
    for row in connection.execute(sa.select(app_key).order_by(app_key.c.tag)):
        found[row.app_no] = (*found.get(row.app_no, ()), TagKeys(row.tag, _hashes(row._mapping)))
    return found


def _hashes(values: Any) -> tuple[bytes, ...]:
    """Newest first."""
    return tuple(h for h in (values["key_hash"], values["old_key_hash"]) if h is not None)


def app_from(values: Any, keys: tuple[TagKeys, ...] = ()) -> App:
    return App(
        number=values["app_no"],
        id=values["id"],
        service_name=values["service_name"],
        biz_id=values["biz_id"],
        alert_email=values["alert_email"],
        alert_phone=values["alert_phone"],
        key_hashes=_hashes(values),
        check_token=values["check_token"],
        disabled=bool(values["disabled"]),
        tag_keys=keys,
    )


def topic_of(row: Any, targets: Mapping[str, CheckTarget] | None = None) -> Topic:
    """targets: those that were set; without any the topic has the usual one."""
    retry = RetryPolicy(
        kind=RetryKind(row.check_retry_kind),
        interval_ms=row.check_interval_ms,
        max_retry=row.check_max_retry,
        cap_ms=row.check_cap_ms,
        max_age_ms=row.check_max_age_ms,
        jitter_percent=row.check_jitter_percent,
    )
    checks = CheckPolicy(targets, retry) if targets else CheckPolicy(retry=retry)
    return Topic(
        number=row.topic_no,
        name=row.name,
        owner=row.owner_no,
        default_tag=row.default_tag,
        table_index=row.table_index,
        spread=row.spread,
        transaction_time_ms=row.transaction_time_ms,
        open_limit=row.open_limit,
        effective_ms=row.effective_ms,
        queue_mode=QueueMode(row.queue_mode),
        signed=bool(row.signed),
        ordered=bool(row.ordered),
        paused=bool(row.paused),
        checks=checks,
    )


def target_of(row: Any) -> CheckTarget:
    return CheckTarget(
        name=row.name,
        kind=row.kind,
        address=row.address,
        options=json.loads(row.options),
        deadline_ms=row.deadline_ms,
        concurrency=row.concurrency,
        batch=row.batch,
        tls=bool(row.tls),
    )


def subscription_of(row: Any) -> Subscription:
    policy = RetryPolicy(
        kind=RetryKind(row.retry_kind),
        interval_ms=row.interval_ms,
        max_retry=row.max_retry,
        cap_ms=row.cap_ms,
        max_age_ms=row.max_age_ms,
        jitter_percent=row.jitter_percent,
    )
    forward = Forward(row.forward_kind, row.forward_target, row.forward_key) if row.forward_kind else None
    return Subscription(
        number=row.subscription_no,
        topic=row.topic_no,
        app=row.app_no,
        tag=row.tag,
        policy=policy,
        effective_ms=row.effective_ms,
        removed_ms=row.removed_ms,
        forward=forward,
        keys=_delivery_keys(row),
        order=OrderMode(row.order_mode),
        paused=bool(row.paused),
    )


def _delivery_keys(row: Any) -> DeliveryKeys | None:
    if not row.delivery_key:
        return None
    other = bytes.fromhex(row.other_key) if row.other_key else None
    return DeliveryKeys(signing=bytes.fromhex(row.delivery_key), other=other)


def silence_of(row: Any) -> Silence:
    return Silence(
        id=row.id,
        kind=row.kind,
        topic=row.topic_no,
        subscription=SubscriptionNumber(row.subscription_no),
        until_ms=row.until_ms,
        actor=row.actor,
        reason=row.reason,
    )
