"""Apps, topics and subscriptions in SQL: every change to them, and the whole catalog at one moment.

Every change increments `catalog_version` in its own transaction. Source: docs/decisions/0013-catalog-activation.md.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.alerts import Silence
from tmc_server.domain.catalog import App, Catalog, Forward, NewApp, NewTopic, Subscription, Topic
from tmc_server.domain.checks import CheckPolicy, CheckTarget
from tmc_server.domain.numbers import SubscriptionNumber
from tmc_server.domain.operators import KnownOperators
from tmc_server.domain.placement import MoveStep
from tmc_server.domain.ports.catalog import CheckChange, NewSilence, NewSubscription
from tmc_server.errors import (
    AlertUnknown,
    AppUnknown,
    CatalogStale,
    InvalidField,
    NameTaken,
    RotationOpen,
    SubscriptionUnknown,
    TopicUnknown,
)
from tmc_server.store.auditing import differences
from tmc_server.store.catalog_changes import CatalogChanges, hash_of, new_key
from tmc_server.store.catalog_rows import (
    app_of,
    forward_of,
    read_or_kept,
    silence_of,
    submit_queues,
    subscription_of,
    tag_keys,
    target_of,
    topic_of,
)
from tmc_server.store.engines import repeating
from tmc_server.store.operators import known_operators
from tmc_server.store.records import columns_of
from tmc_server.store.sql import number_of
from tmc_server.store.tables import (
    app,
    app_key,
    check_target,
    meta,
    server,
    shard_map,
    shard_move,
    silence,
    submit_queue,
    subscription,
    topic,
)


class CatalogStore(CatalogChanges):
    """domain.ports.catalog.CatalogEditor, and what servers read."""

    @repeating
    def register_app(self, actor: str, new: NewApp) -> tuple[App, str]:
        """Returns: the app, its key ("" when it was there already). Raises NameTaken."""
        key = new_key()
        id_, values = new.id, columns_of(new, leave_out=["id"])
        with self._change(actor, "register app", id_) as (connection, now):
            row = connection.execute(sa.select(app).where(app.c.id == id_)).one_or_none()
            if row is not None:
                if any(row._mapping[name] != value for name, value in values.items()):
                    raise NameTaken
                number = row.app_no
                return app_of(row, tag_keys(connection).get(number, ()), submit_queues(connection).get(number, ())), ""
            number = _next(connection, app.c.app_no)
            secret = {"key_hash": hash_of(key), "check_token": secrets.token_hex(32)}
            connection.execute(app.insert().values(app_no=number, id=id_, **values, **secret, created_ms=now))
            return app_of(connection.execute(sa.select(app).filter_by(app_no=number)).one()), key

    @repeating
    def add_key(self, actor: str, id_: str, replace_newest: bool, tag: str = "") -> str:
        """Add a second key; the first still works. tag: add the first or second key of this environment.

        Returns: key. Raises AppUnknown, RotationOpen.
        """
        key = new_key()
        with self._change(actor, "add app key", f"{id_} {tag}".rstrip()) as (connection, now):
            keys = _KeyRow.find(connection, id_, tag)
            if keys.key_hash is None:
                connection.execute(
                    app_key.insert().values(app_no=keys.app_no, tag=tag, key_hash=hash_of(key), created_ms=now)
                )
                return key
            if keys.old_key_hash is not None and not replace_newest:
                raise RotationOpen
            kept = keys.key_hash if keys.old_key_hash is None else keys.old_key_hash
            keys.update(connection, {"key_hash": hash_of(key), "old_key_hash": kept})
            return key

    @repeating
    def drop_old_key(self, actor: str, id_: str, tag: str = "", drop_newest: bool = False) -> None:
        """Drop the older key; drop_newest: drop all keys of this environment. Raises AppUnknown."""
        action = "drop all keys of tag" if drop_newest else "drop old app key"
        with self._change(actor, action, f"{id_} {tag}".rstrip()) as (connection, _):
            keys = _KeyRow.find(connection, id_, tag)
            if drop_newest:
                connection.execute(app_key.delete().filter_by(app_no=keys.app_no, tag=tag))
            else:
                keys.update(connection, {"old_key_hash": None})

    @repeating
    def open_submit_queue(self, actor: str, id_: str, tag: str, unsigned: bool, replace_newest: bool) -> str:
        secret = "" if unsigned else secrets.token_hex(32)
        action = "open submit queue, unsigned" if unsigned else "open submit queue"
        with self._change(actor, action, f"{id_} {tag}") as (connection, now):
            name = {"app_no": _app_no(connection, id_), "tag": tag}
            row = connection.execute(sa.select(submit_queue).filter_by(**name)).one_or_none()
            if row is None:
                connection.execute(submit_queue.insert().values(**name, secret=secret, created_ms=now))
                return secret
            if unsigned is bool(row.secret):
                raise NameTaken(f"The queue is open, and {'signed' if unsigned else 'not signed'}: close it first.")
            if row.old_secret and not replace_newest:
                raise RotationOpen("The queue has two secrets: drop the old one first, or ask to replace the newest.")
            changed = submit_queue.update().filter_by(**name)
            connection.execute(changed.values(secret=secret, old_secret=row.old_secret or row.secret))
            return secret

    @repeating
    def drop_old_submit_secret(self, actor: str, id_: str, tag: str) -> None:
        with self._change(actor, "drop old submit secret", f"{id_} {tag}") as (connection, _):
            name = {"app_no": _app_no(connection, id_), "tag": tag}
            connection.execute(submit_queue.update().filter_by(**name).values(old_secret=""))

    @repeating
    def close_submit_queue(self, actor: str, id_: str, tag: str, reason: str) -> None:
        with self._change(actor, "close submit queue", f"{id_} {tag}", reason) as (connection, _):
            connection.execute(submit_queue.delete().filter_by(app_no=_app_no(connection, id_), tag=tag))

    @repeating
    def rotate_check_token(self, actor: str, id_: str, reason: str) -> None:
        with self._change(actor, "rotate check token", id_, reason) as (connection, _):
            number = _app_no(connection, id_)
            connection.execute(app.update().where(app.c.app_no == number).values(check_token=secrets.token_hex(32)))

    @repeating
    def set_disabled(self, actor: str, id_: str, disabled: bool, reason: str) -> None:
        with self._change(actor, "disable app" if disabled else "enable app", id_, reason) as (connection, _):
            number = _app_no(connection, id_)
            connection.execute(app.update().where(app.c.app_no == number).values(disabled=int(disabled)))

    @repeating
    def register_topic(self, actor: str, new: NewTopic) -> Topic:
        """owner "": nobody yet. Raises AppUnknown for the owner, NameTaken when it exists with other settings."""
        with self._change(actor, "register topic", new.name) as (connection, now):
            owner = _app_no(connection, new.owner) if new.owner else 0
            row = connection.execute(sa.select(topic).where(topic.c.name == new.name)).one_or_none()
            values = {"owner_no": owner, **columns_of(new, leave_out=["owner"])}
            if row is not None:
                if any(row._mapping[name] != value for name, value in values.items()):
                    raise NameTaken
                return topic_of(row)
            number = _next(connection, topic.c.topic_no)
            values |= {"effective_ms": self._effective(now), **columns_of(CheckPolicy().retry, "check_")}
            connection.execute(topic.insert().values(topic_no=number, **values))
            return topic_of(connection.execute(sa.select(topic).where(topic.c.topic_no == number)).one())

    @repeating
    def set_topic_check(
        self, actor: str, topic_name: str, checks: CheckPolicy, change: CheckChange | None = None
    ) -> Topic:
        changed: list[str] = []
        with self._change(actor, "set topic check", topic_name, changed=changed) as (connection, _):
            row = _topic_row(connection, topic_name)
            number = row.topic_no
            targets = sa.select(check_target).where(check_target.c.topic_no == number).order_by(check_target.c.name)
            before = connection.execute(targets).fetchall()
            policy = columns_of(checks.retry)
            fields = policy if change is None else change.policy
            if fields:
                values = {f"check_{field}": policy[field] for field in fields}
                changed += differences(row._mapping, values)
                connection.execute(topic.update().where(topic.c.topic_no == number).values(**values))
            replaced = check_target.delete().where(check_target.c.topic_no == number)
            if change is not None:
                replaced = replaced.where(check_target.c.name.in_([*checks.targets, *change.removed_targets]))
            connection.execute(replaced)
            for target in checks.targets.values():
                options = json.dumps(dict(target.options), ensure_ascii=False)
                values = columns_of(target, leave_out=["options"])
                connection.execute(check_target.insert().values(topic_no=number, **values, options=options))
            stored = connection.execute(targets).fetchall()
            changed += _changed_targets(before, stored)
            return topic_of(_topic_row(connection, topic_name), {row.name: target_of(row) for row in stored})

    @repeating
    def update_topic(self, actor: str, topic_name: str, changes: Mapping[str, int]) -> Topic:
        changed: list[str] = []
        with self._change(actor, "update topic", topic_name, changed=changed) as (connection, _):
            before = _topic_row(connection, topic_name)
            number = before.topic_no
            changed += differences(before._mapping, changes)
            if changes:
                connection.execute(topic.update().where(topic.c.topic_no == number).values(**changes))
            return topic_of(_topic_row(connection, topic_name))

    @repeating
    def pause_topic(self, actor: str, topic_name: str, paused: bool, reason: str) -> Topic:
        with self._change(actor, "pause topic" if paused else "resume topic", topic_name, reason) as (connection, _):
            number = _topic_row(connection, topic_name).topic_no
            connection.execute(topic.update().where(topic.c.topic_no == number).values(paused=int(paused)))
            return topic_of(_topic_row(connection, topic_name))

    @repeating
    def silence_alerts(self, actor: str, new: NewSilence) -> Silence:
        scope = " ".join(filter(None, (new.kind, new.topic, new.app, new.tag))) or "all"
        with self._change(actor, "silence alerts", scope, new.reason) as (connection, now):
            connection.execute(silence.delete().where(silence.c.until_ms <= now))
            topic_no = _topic_row(connection, new.topic).topic_no if new.topic else 0
            values = {
                "kind": new.kind,
                "topic_no": topic_no,
                "subscription_no": new.subscription,
                "until_ms": now + new.for_ms,
                "actor": actor,
                "reason": new.reason,
            }
            made = connection.execute(silence.insert().values(values))
            return silence_of(connection.execute(sa.select(silence).filter_by(id=number_of(made))).one())

    @repeating
    def end_silence(self, actor: str, id_: int, reason: str) -> Silence:
        with self._change(actor, "end silence", str(id_), reason) as (connection, _):
            row = connection.execute(sa.select(silence).filter_by(id=id_)).one_or_none()
            if row is None:
                raise AlertUnknown(f"There is no silence {id_}: list them to see their numbers.")
            connection.execute(silence.delete().where(silence.c.id == id_))
            return silence_of(row)

    @repeating
    def drain_server(self, actor: str, incarnation: int, drained: bool, reason: str, others: Collection[int]) -> None:
        action = "drain server" if drained else "undrain server"
        with self._change(actor, action, str(incarnation), reason) as (connection, _):
            sharing = sa.select(server.c.incarnation).where(server.c.incarnation.in_(others), server.c.drained == 0)
            if drained and connection.execute(sharing).first() is None:
                raise InvalidField(
                    "server", "not be the last one that looks after shards: undrain or start another one"
                )
            connection.execute(server.update().where(server.c.incarnation == incarnation).values(drained=int(drained)))

    @repeating
    def claim_topic(self, topic_name: str, app_id: str, ordered: bool) -> None:
        """Give a topic that nobody owns yet (owner 0: a consumer named it first) to an app. For `tmc dev`."""
        with self._change("first use", "claim topic", topic_name) as (connection, _):
            owner = _app_no(connection, app_id)
            values = {"owner_no": owner, "ordered": int(ordered)}
            connection.execute(topic.update().filter_by(name=topic_name, owner_no=0).values(**values))

    @repeating
    def register_subscription(
        self, actor: str, new: NewSubscription, change: Collection[str] | None = None
    ) -> Subscription:
        changed: list[str] = []
        named = f"{new.topic} {new.app} {new.tag}"
        with self._change(actor, "register subscription", named, changed=changed) as (connection, now):
            topic_row = _topic_row(connection, new.topic)
            name = _name(connection, topic_row, new.app, new.tag)
            values = {**columns_of(new.policy), "order_mode": int(new.order)}
            row: Any = connection.execute(sa.select(subscription).filter_by(**name, live=1)).one_or_none()
            if row is None:
                # Never reuse a removed number: a server whose copy shows it removed would cancel new deliveries.
                number = SubscriptionNumber(_next(connection, subscription.c.subscription_no))
                places = columns_of(new.forward, "forward_") if new.forward is not None else {}
                fresh = {"effective_ms": self._effective(now), "removed_ms": None, "live": 1}
                own_key = _new_delivery_key() if topic_row.signed else ""
                keys = _keys_of_the_last_life(connection, name) or {"delivery_key": own_key}
                connection.execute(
                    subscription.insert().values(subscription_no=number, **name, **values, **places, **fresh, **keys)
                )
            elif (change is None or new.forward is not None) and not _may_send(forward_of(row), new.forward):
                raise NameTaken(
                    "This subscription sends elsewhere. Take another tag or app; or, once nothing of it waits, remove it first."
                )
            else:
                number = row.subscription_no
                again = subscription.update().filter_by(subscription_no=number)
                changing = values if change is None else [_COLUMNS.get(field, field) for field in change]
                wanted = {column: values[column] for column in changing}
                wanted |= columns_of(new.forward, "forward_") if new.forward is not None else {}
                changed += differences(row._mapping, wanted)
                connection.execute(again.values(**wanted, leaving_ms=None))
            return _subscription_row(connection, number)

    @repeating
    def show_delivery_keys(self, actor: str, number: SubscriptionNumber) -> None:
        with self._change(actor, "show delivery keys", f"subscription {number}"):
            pass

    @repeating
    def announce_delivery_key(
        self, actor: str, topic_name: str, app_id: str, tag: str, drop_previous: bool
    ) -> Subscription:
        with self._change(actor, "rotate delivery key", f"{topic_name} {app_id} {tag}") as (connection, _):
            name = _name(connection, _topic_row(connection, topic_name), app_id, tag)
            row = connection.execute(sa.select(subscription).filter_by(**name, live=1)).one_or_none()
            if row is None or not row.delivery_key:
                raise SubscriptionUnknown.for_operators()
            if row.other_key and not drop_previous:
                raise RotationOpen(
                    "Copies that are signed with the key before this one are still accepted: let queues run empty, then "
                    "repeat this with drop_previous."
                )
            mine = subscription.update().filter_by(subscription_no=row.subscription_no)
            connection.execute(mine.values(other_key=_new_delivery_key()))
            return _subscription_row(connection, row.subscription_no)

    @repeating
    def sign_with(self, actor: str, number: SubscriptionNumber, announced: bytes) -> Subscription:
        with self._change(actor, "sign with new key", f"subscription {number}") as (connection, _):
            row = connection.execute(sa.select(subscription).filter_by(subscription_no=number)).one()
            if row.other_key == announced.hex():
                mine = subscription.update().filter_by(subscription_no=number)
                connection.execute(mine.values(delivery_key=row.other_key, other_key=row.delivery_key))
            return _subscription_row(connection, number)

    @repeating
    def pause_subscription(
        self, actor: str, topic_name: str, app_id: str, tag: str, paused: bool, reason: str
    ) -> Subscription:
        action = "pause subscription" if paused else "resume subscription"
        with self._change(actor, action, f"{topic_name} {app_id} {tag}", reason) as (connection, _):
            name = _name(connection, _topic_row(connection, topic_name), app_id, tag)
            row = connection.execute(sa.select(subscription).filter_by(**name, live=1)).one_or_none()
            if row is None:
                raise SubscriptionUnknown.for_operators()
            mine = subscription.update().filter_by(subscription_no=row.subscription_no)
            connection.execute(mine.values(paused=int(paused)))
            return _subscription_row(connection, row.subscription_no)

    @repeating
    def remove_subscription(self, actor: str, topic_name: str, app_id: str, tag: str) -> Subscription:
        """See domain.ports.catalog.CatalogEditor. One that is removed already stays as it is."""
        with self._change(actor, "remove subscription", f"{topic_name} {app_id} {tag}") as (connection, now):
            name = _name(connection, _topic_row(connection, topic_name), app_id, tag)
            lives = sa.select(subscription).filter_by(**name).order_by(subscription.c.subscription_no.desc())
            row = connection.execute(lives.limit(1)).one_or_none()
            if row is None:
                raise SubscriptionUnknown.for_operators()
            leaving = subscription.update().filter_by(subscription_no=row.subscription_no, live=1, leaving_ms=None)
            connection.execute(leaving.values(leaving_ms=now))
            return _subscription_row(connection, row.subscription_no)

    @repeating
    def finish_removal(self, actor: str, number: SubscriptionNumber) -> Subscription:
        with self._change(actor, "finish removal", f"subscription {number}") as (connection, now):
            leaving = subscription.update().filter_by(subscription_no=number, live=1)
            connection.execute(leaving.where(subscription.c.leaving_ms.is_not(None)).values(live=None, removed_ms=now))
            return _subscription_row(connection, number)

    @repeating
    def confirm(
        self, topics: Collection[int], subscriptions: Collection[SubscriptionNumber], effective_ms: int
    ) -> None:
        """See domain.ports.catalog.CatalogEditor. Nothing is decided by these times: no audit row, and nobody is waited for."""
        with self._database.transaction() as connection:
            connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1))
            for table, column, numbers in (
                (topic, topic.c.topic_no, topics),
                (subscription, subscription.c.subscription_no, subscriptions),
            ):
                pending = table.update().where(column.in_(list(numbers)), table.c.effective_ms == 0)
                connection.execute(pending.values(effective_ms=effective_ms))

    def _effective(self, now: int) -> int:
        """effective_ms of a new row: with several servers 0, until all of them know the row."""
        return 0 if self.change_delay_ms else now

    def peek(self, incarnation: int | None = None) -> int:
        """The current version. incarnation: the server run that reads it.

        Raises CatalogStale: other servers have barred this run from the catalog, because its heartbeat had expired.
        """
        version = f"SELECT catalog_version FROM {meta.name}"
        if incarnation is not None:
            mine = f"SELECT 1 FROM {server.name} WHERE incarnation = {int(incarnation)} AND silenced = 0"
            version = f"SELECT CASE WHEN EXISTS ({mine}) THEN catalog_version ELSE -1 END FROM {meta.name}"
        with self._database.reading() as connection:
            found = int(self._database.now_and(connection, version)[1])
        if found < 0:
            raise CatalogStale(
                "The heartbeat of this server was over: it reads the catalog again under another identity."
            )
        return found

    def operators_now(self) -> KnownOperators:
        """Read the operators alone, so that a revoked right ends even if the rest of the catalog cannot be read."""
        with self._database.reading() as connection:
            return known_operators(connection)

    def load(self, before: Catalog) -> Catalog:
        """Return everything as of one moment. before: the copy so far, for rows that cannot be read; see `read_or_kept`.

        Raises StoreUnavailable.
        """
        with self._database.snapshot() as connection:
            version = int(connection.execute(sa.select(meta.c.catalog_version)).scalar_one())
            targets: dict[int, dict[str, CheckTarget]] = {}
            for row in connection.execute(sa.select(check_target)):
                kept = before.topics[row.topic_no].checks.targets if row.topic_no in before.topics else {}
                name = f"check target {row.name!r} of topic {row.topic_no}"
                targets.setdefault(row.topic_no, {})[row.name] = read_or_kept(name, target_of, row, kept.get(row.name))
            keys, queues = tag_keys(connection), submit_queues(connection)
            return Catalog(
                version=version,
                apps={
                    row.app_no: app_of(row, keys.get(row.app_no, ()), queues.get(row.app_no, ()))
                    for row in connection.execute(sa.select(app))
                },
                topics={
                    row.topic_no: read_or_kept(
                        f"topic {row.topic_no}",
                        partial(topic_of, targets=targets.get(row.topic_no)),
                        row,
                        before.topics.get(row.topic_no),
                    )
                    for row in connection.execute(sa.select(topic))
                },
                subscriptions={
                    row.subscription_no: read_or_kept(
                        f"subscription {row.subscription_no}",
                        subscription_of,
                        row,
                        before.subscriptions.get(row.subscription_no),
                    )
                    for row in connection.execute(sa.select(subscription))
                },
                shard_map={row.shard: row.identity for row in connection.execute(sa.select(shard_map))},
                moving={
                    row.shard: MoveStep(row.step)
                    for row in connection.execute(sa.select(shard_move).where(shard_move.c.step < MoveStep.MOVED))
                },
                silences=[silence_of(row) for row in connection.execute(sa.select(silence).order_by(silence.c.id))],
            )


def _may_send(before: Forward | None, after: Forward | None) -> bool:
    """Return whether a subscription that sends there may send here. None: it has a queue."""
    return before == after or (before is not None and after is not None and before.may_become(after))


_COLUMNS = {"order": "order_mode"}  # of a subscription, where it is not the name of the field


@dataclass(frozen=True, kw_only=True)
class _KeyRow:
    """Hashes of an app's keys. tag "": for all environments, in tmc_app.  key_hash None: there is no key yet."""

    app_no: int
    tag: str
    key_hash: bytes | None
    old_key_hash: bytes | None

    @classmethod
    def find(cls, connection: sa.Connection, app_id: str, tag: str) -> _KeyRow:
        """Raises AppUnknown."""
        number = _app_no(connection, app_id)
        where = {"app_no": number, "tag": tag} if tag else {"app_no": number}
        row = connection.execute(sa.select(app_key if tag else app).filter_by(**where)).one_or_none()
        key_hash, old_key_hash = (row.key_hash, row.old_key_hash) if row is not None else (None, None)
        return cls(app_no=number, tag=tag, key_hash=key_hash, old_key_hash=old_key_hash)

    def update(self, connection: sa.Connection, values: Mapping[str, bytes | None]) -> None:
        if self.tag:
            connection.execute(app_key.update().filter_by(app_no=self.app_no, tag=self.tag).values(**values))
        else:
            connection.execute(app.update().filter_by(app_no=self.app_no).values(**values))


def _changed_targets(before: Sequence[Any], after: Sequence[Any]) -> list[str]:
    """Describe changed targets for the audit trail."""
    old, new = ({row.name: _in_words(row) for row in rows} for rows in (before, after))
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    return [f"target {name or '(unnamed)'}: {old.get(name, 'none')} -> {new.get(name, 'none')}" for name in names]


def _in_words(target: Any) -> str:
    limits = f"deadline_ms={target.deadline_ms} concurrency={target.concurrency} batch={target.batch} tls={target.tls}"
    return f"{target.kind} {target.address} {target.options} {limits}"


def _next(connection: sa.Connection, column: sa.Column[int]) -> int:
    # Safe: every change holds the lock of the version row.
    return int(connection.execute(sa.select(sa.func.coalesce(sa.func.max(column), 0))).scalar_one()) + 1


def _app_no(connection: sa.Connection, id_: str) -> int:
    number = connection.execute(sa.select(app.c.app_no).where(app.c.id == id_)).scalar_one_or_none()
    if number is None:
        raise AppUnknown(f"There is no app {id_!r}: register it first.")
    return int(number)


def _topic_row(connection: sa.Connection, name: str) -> Any:
    row = connection.execute(sa.select(topic).where(topic.c.name == name)).one_or_none()
    if row is None:
        raise TopicUnknown(f"There is no topic {name!r}: register it first.")
    return row


def _name(connection: sa.Connection, topic_row: Any, app_id: str, tag: str) -> dict[str, Any]:
    app_no = _app_no(connection, app_id)
    return {"topic_no": topic_row.topic_no, "app_no": app_no, "tag": tag or topic_row.default_tag}


def _new_delivery_key() -> str:
    return secrets.token_hex(32)


def _keys_of_the_last_life(connection: sa.Connection, name: Mapping[str, Any]) -> dict[str, Any] | None:
    """Keys of the last removed subscription of this name, whose copies may still be in the queue they share."""
    lives = sa.select(subscription).filter_by(**name).order_by(subscription.c.subscription_no.desc()).limit(1)
    last = connection.execute(lives).one_or_none()
    if last is None or not last.delivery_key:
        return None
    return {column: getattr(last, column) for column in ("delivery_key", "other_key")}


def _subscription_row(connection: sa.Connection, number: SubscriptionNumber) -> Subscription:
    return subscription_of(connection.execute(sa.select(subscription).filter_by(subscription_no=number)).one())
