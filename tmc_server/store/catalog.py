"""Apps, topics, subscriptions and operators in SQL, and the server's copy of them.

Every change raises `catalog_version` in its own transaction and takes effect `change_delay_ms` later. The watch reads the
version every second and the whole catalog when it changed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import sqlalchemy as sa

from tmc_server.domain.catalog import App, Catalog, Forward, QueueMode, Subscription, Topic
from tmc_server.domain.checks import CheckPolicy, CheckTarget
from tmc_server.domain.ports import NewTopic
from tmc_server.domain.retry import RetryKind, RetryPolicy
from tmc_server.errors import (
    AppUnknown,
    NameTaken,
    RotationOpen,
    StoreUnavailable,
    SubscriptionUnknown,
    TopicUnknown,
)
from tmc_server.store.engines import Database, repeated
from tmc_server.store.tables import app, audit, check_target, meta, operator, subscription, topic

P = ParamSpec("P")
T = TypeVar("T")
FIRST_OPERATOR = "admin"
_CLOCK_MARGIN_MS = 1000


def new_key() -> str:
    """256 random bits, as text that can be pasted anywhere."""
    return secrets.token_urlsafe(32)


def hash_of(key: str) -> bytes:
    """Keys are random, so one fast hash is enough to store them."""
    return hashlib.sha256(key.encode()).digest()


def _repeating(change: Callable[P, T]) -> Callable[P, T]:
    """Run a change again when it loses against another one."""

    @functools.wraps(change)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return repeated(lambda: change(*args, **kwargs))

    return run


class CatalogStore:
    """change_delay_ms: from storing a change to its effect; 0 for a center of one process."""

    def __init__(self, database: Database, change_delay_ms: int) -> None:
        self._database = database
        self.change_delay_ms = change_delay_ms

    @contextmanager
    def _change(self, actor: str, action: str, subject: str) -> Iterator[tuple[sa.Connection, int]]:
        """A transaction that raises the version and leaves an audit row. Yields: connection, time of effect."""
        with self._database.transaction() as connection:
            raised = connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1)).rowcount
            if raised != 1:
                raise StoreUnavailable("The catalog has no tables yet: run tmc init.")
            now = self._database.now(connection)
            yield connection, now + self.change_delay_ms
            connection.execute(audit.insert().values(at_ms=now, actor=actor, action=action, subject=subject, reason=""))

    @_repeating
    def register_app(
        self, actor: str, id_: str, service_name: str, biz_id: str, alert_email: str, alert_phone: str
    ) -> tuple[App, str, int]:
        """Returns: the app, its key ("" when it was there already), time of effect. Raises NameTaken."""
        key = new_key()
        values = {
            "service_name": service_name,
            "biz_id": biz_id,
            "alert_email": alert_email,
            "alert_phone": alert_phone,
        }
        with self._change(actor, "register app", id_) as (connection, effective):
            row = connection.execute(sa.select(app).where(app.c.id == id_)).one_or_none()
            if row is not None:
                if any(row._mapping[name] != value for name, value in values.items()):
                    raise NameTaken
                return _app(row), "", effective
            number = _next(connection, app.c.app_no)
            row_values = {"app_no": number, "id": id_, **values, "key_hash": hash_of(key), "old_key_hash": None}
            row_values["check_token"] = secrets.token_hex(32)
            connection.execute(app.insert().values(**row_values, created_ms=self._database.now(connection)))
            return _app_from(row_values), key, effective

    @_repeating
    def make_check_token(self, actor: str, id_: str) -> str:
        """For an app that an older server registered. Returns: its token, the one it has by now."""
        with self._change(actor, "make check token", id_) as (connection, _):
            fresh = (
                app.update().where(app.c.id == id_, app.c.check_token == "").values(check_token=secrets.token_hex(32))
            )
            connection.execute(fresh)
            return str(connection.execute(sa.select(app.c.check_token).where(app.c.id == id_)).scalar_one())

    @_repeating
    def add_key(self, actor: str, id_: str, replace_newest: bool) -> tuple[str, int]:
        """A second key; the first goes on working. Returns: key, time of effect. Raises AppUnknown, RotationOpen."""
        key = new_key()
        with self._change(actor, "add app key", id_) as (connection, effective):
            row = connection.execute(sa.select(app).where(app.c.id == id_)).one_or_none()
            if row is None:
                raise AppUnknown
            if row.old_key_hash is not None and not replace_newest:
                raise RotationOpen
            kept = row.key_hash if row.old_key_hash is None else row.old_key_hash
            values = {"key_hash": hash_of(key), "old_key_hash": kept}
            connection.execute(app.update().where(app.c.id == id_).values(values))
            return key, effective

    @_repeating
    def drop_old_key(self, actor: str, id_: str) -> int:
        """Only the newest key works afterwards. Returns: time of effect."""
        with self._change(actor, "drop old app key", id_) as (connection, effective):
            if connection.execute(app.update().where(app.c.id == id_).values(old_key_hash=None)).rowcount != 1:
                raise AppUnknown
            return effective

    @_repeating
    def register_topic(self, actor: str, new: NewTopic) -> Topic:
        """owner "": nobody yet. Raises AppUnknown for the owner, NameTaken when it exists with other settings."""
        with self._change(actor, "register topic", new.name) as (connection, effective):
            owner = _app_no(connection, new.owner) if new.owner else 0
            row = connection.execute(sa.select(topic).where(topic.c.name == new.name)).one_or_none()
            values = {
                "owner_no": owner,
                "default_tag": new.default_tag,
                "table_index": new.table_index,
                "spread": new.spread,
                "transaction_time_ms": new.transaction_time_ms,
                "open_limit": new.open_limit,
                "queue_mode": int(new.queue_mode),
            }
            if row is not None:
                if any(row._mapping[name] != value for name, value in values.items()):
                    raise NameTaken
                return _topic(row)
            number = _next(connection, topic.c.topic_no)
            connection.execute(topic.insert().values(topic_no=number, name=new.name, effective_ms=effective, **values))
            return _topic(connection.execute(sa.select(topic).where(topic.c.topic_no == number)).one())

    @_repeating
    def set_topic_check(self, actor: str, topic_name: str, checks: CheckPolicy) -> tuple[Topic, int]:
        """All targets of a topic and its policy, instead of those it had. Returns: topic, time of effect."""
        with self._change(actor, "set topic check", topic_name) as (connection, effective):
            number = _topic_row(connection, topic_name).topic_no
            retry = checks.retry
            values = {
                "check_retry_kind": int(retry.kind), "check_interval_ms": retry.interval_ms,
                "check_max_retry": retry.max_retry, "check_cap_ms": retry.cap_ms,
            }  # fmt: skip
            connection.execute(topic.update().where(topic.c.topic_no == number).values(**values))
            connection.execute(check_target.delete().where(check_target.c.topic_no == number))
            for target in checks.targets.values():
                connection.execute(
                    check_target.insert().values(
                        topic_no=number, name=target.name, kind=target.kind, address=target.address,
                        options=json.dumps(dict(target.options), ensure_ascii=False), deadline_ms=target.deadline_ms,
                        concurrency=target.concurrency, batch=target.batch, tls=int(target.tls),
                    )
                )  # fmt: skip
            return _topic(_topic_row(connection, topic_name), checks.targets), effective

    @_repeating
    def claim_topic(self, topic_name: str, app_id: str) -> None:
        """Give a topic that nobody owns yet (owner 0: a consumer named it first) to an app. For `tmc dev`."""
        with self._change("first use", "claim topic", topic_name) as (connection, _):
            owner = _app_no(connection, app_id)
            connection.execute(topic.update().filter_by(name=topic_name, owner_no=0).values(owner_no=owner))

    @_repeating
    def register_subscription(
        self, actor: str, topic_name: str, app_id: str, tag: str, policy: RetryPolicy, forward: Forward | None = None
    ) -> Subscription:
        """tag "": the topic's default. Again with another policy changes it; after a removal it starts anew.

        Raises NameTaken: it exists and sends elsewhere.
        """
        with self._change(actor, "register subscription", f"{topic_name} {app_id} {tag}") as (connection, effective):
            topic_row = _topic_row(connection, topic_name)
            key = {"topic_no": topic_row.topic_no, "app_no": _app_no(connection, app_id)}
            key["tag"] = tag or topic_row.default_tag
            values = {
                "retry_kind": int(policy.kind),
                "interval_ms": policy.interval_ms,
                "max_retry": policy.max_retry,
                "cap_ms": policy.cap_ms,
            }
            row = connection.execute(sa.select(subscription).filter_by(**key)).one_or_none()
            where = forward or Forward("", "", "")
            if row is None:
                number = _next(connection, subscription.c.subscription_no)
                places = {"forward_kind": where.kind, "forward_target": where.target, "forward_key": where.key}
                connection.execute(
                    subscription.insert().values(
                        subscription_no=number, **key, **values, **places, effective_ms=effective, removed_ms=None
                    )
                )
            elif (row.forward_kind, row.forward_target, row.forward_key) != (where.kind, where.target, where.key):
                raise NameTaken("This subscription sends elsewhere: remove it and take another tag or app.")
            else:
                number = row.subscription_no
                revived: dict[str, int | None] = {}
                if row.removed_ms is not None:  # a removal that is not in effect yet is taken back without a gap
                    gone = row.removed_ms <= self._database.now(connection)
                    revived = {"removed_ms": None} | ({"effective_ms": effective} if gone else {})
                connection.execute(subscription.update().filter_by(subscription_no=number).values(**values, **revived))
            return _subscription_row(connection, number)

    @_repeating
    def remove_subscription(self, actor: str, topic_name: str, app_id: str, tag: str) -> Subscription:
        """Messages submitted after the time of effect do not reach it. Raises SubscriptionUnknown."""
        with self._change(actor, "remove subscription", f"{topic_name} {app_id} {tag}") as (connection, effective):
            topic_row = _topic_row(connection, topic_name)
            key = {
                "topic_no": topic_row.topic_no,
                "app_no": _app_no(connection, app_id),
                "tag": tag or topic_row.default_tag,
            }
            row = connection.execute(sa.select(subscription).filter_by(**key)).one_or_none()
            if row is None:
                raise SubscriptionUnknown("There is no such subscription: list them to see topic, app and tag.")
            if row.removed_ms is None:
                connection.execute(
                    subscription.update().filter_by(subscription_no=row.subscription_no).values(removed_ms=effective)
                )
            return _subscription_row(connection, row.subscription_no)

    @_repeating
    def make_operator(self, name: str, replace: bool = False) -> str | None:
        """A token for an operator. None: it has one, which is stored nowhere; `replace` makes a new one."""
        token = new_key()
        with self._change(name, "make operator", name) as (connection, _):
            known = connection.execute(sa.select(operator).filter_by(name=name)).one_or_none()
            if known is not None and not replace:
                return None
            now = self._database.now(connection)
            connection.execute(operator.delete().filter_by(name=name))
            connection.execute(operator.insert().values(name=name, token_hash=hash_of(token), created_ms=now))
        return token

    def operators(self) -> dict[bytes, str]:
        """Names by the SHA-256 of their tokens."""
        with self._database.reading() as connection:
            return {row.token_hash: row.name for row in connection.execute(sa.select(operator))}

    def peek(self) -> tuple[int, int]:
        """The catalog database's clock, and the version as of then or later."""
        with self._database.reading() as connection:
            now, version = self._database.now_and(connection, f"SELECT catalog_version FROM {meta.name}")
            return now, int(version)

    def load(self) -> Catalog:
        """One consistent copy: the version is read first, so a change meanwhile is read again next time."""
        with self._database.reading() as connection:
            version = int(connection.execute(sa.select(meta.c.catalog_version)).scalar_one())
            targets: dict[int, dict[str, CheckTarget]] = {}
            for row in connection.execute(sa.select(check_target)):
                targets.setdefault(row.topic_no, {})[row.name] = _target(row)
            return Catalog(
                version,
                {row.app_no: _app(row) for row in connection.execute(sa.select(app))},
                {row.topic_no: _topic(row, targets.get(row.topic_no)) for row in connection.execute(sa.select(topic))},
                {row.subscription_no: _subscription(row) for row in connection.execute(sa.select(subscription))},
            )


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


def _subscription_row(connection: sa.Connection, number: int) -> Subscription:
    return _subscription(connection.execute(sa.select(subscription).filter_by(subscription_no=number)).one())


def _app(row: Any) -> App:
    return _app_from(row._mapping)


def _app_from(values: Any) -> App:
    hashes = tuple(h for h in (values["key_hash"], values["old_key_hash"]) if h is not None)
    return App(
        values["app_no"], values["id"], values["service_name"], values["biz_id"], values["alert_email"],
        values["alert_phone"], hashes, values["check_token"],
    )  # fmt: skip


def _topic(row: Any, targets: Mapping[str, CheckTarget] | None = None) -> Topic:
    """targets: those that were set; without any the topic has the usual one."""
    retry = RetryPolicy(RetryKind(row.check_retry_kind), row.check_interval_ms, row.check_max_retry, row.check_cap_ms)
    checks = CheckPolicy(targets, retry) if targets else CheckPolicy(retry=retry)
    return Topic(
        row.topic_no, row.name, row.owner_no, row.default_tag, row.table_index, row.spread, row.transaction_time_ms,
        row.open_limit, row.effective_ms, QueueMode(row.queue_mode), checks,
    )  # fmt: skip


def _target(row: Any) -> CheckTarget:
    return CheckTarget(
        row.name, row.kind, row.address, json.loads(row.options), row.deadline_ms, row.concurrency, row.batch,
        bool(row.tls),
    )  # fmt: skip


def _subscription(row: Any) -> Subscription:
    policy = RetryPolicy(RetryKind(row.retry_kind), row.interval_ms, row.max_retry, row.cap_ms)
    forward = Forward(row.forward_kind, row.forward_target, row.forward_key) if row.forward_kind else None
    return Subscription(
        row.subscription_no, row.topic_no, row.app_no, row.tag, policy, row.effective_ms, row.removed_ms, forward
    )


class CatalogWatch:
    """The server's copy (domain.ports.CatalogSource). Read and refreshed from any thread."""

    def __init__(self, store: CatalogStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._catalog = Catalog()
        self._operators: dict[bytes, str] = {}
        self._read_ms = 0

    @property
    def current(self) -> Catalog:
        return self._catalog

    @property
    def operators(self) -> dict[bytes, str]:
        return self._operators

    def is_stale(self, now: int) -> bool:
        """A copy read longer ago than a change takes to come into effect may lack a subscription. 0: one process.

        `now` is a shard database's clock and the copy's time the catalog database's: they may differ by the margin.
        """
        delay = self._store.change_delay_ms
        return delay > 0 and now - self._read_ms >= delay - min(_CLOCK_MARGIN_MS, delay // 4)

    @property
    def period_s(self) -> float:
        """How often to look for changes, so that a healthy server's copy is never stale."""
        delay = self._store.change_delay_ms
        return min(1.0, delay / 4000) if delay else 1.0

    def run_once(self) -> bool:
        """Look for changes. Returns: there were some. Raises StoreUnavailable: the copy grows older."""
        with self._lock:
            read_ms, version = self._store.peek()
            changed = version != self._catalog.version
            if changed:
                catalog, operators = self._store.load(), self._store.operators()
                self._catalog, self._operators = catalog, operators
            self._read_ms = read_ms
        return changed
