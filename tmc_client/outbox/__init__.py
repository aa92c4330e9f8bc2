"""The outbox: a table in the business database. A message is written in the business transaction and sent after its commit.

It is sent directly by the process that committed it, and otherwise by a relay, again and again until the target has
taken it. Nothing else is needed at the time of the transaction: neither the center nor a broker.

    outbox = tmc.Outbox(engine, center)
    with Session(engine) as session:
        session.add(order)
        outbox.add(session, "order.paid", {"order": 7}, key="paid-7")
        session.commit()
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction, registry, scoped_session

from tmc_client import errors
from tmc_client.codecs import Topic
from tmc_client.extras import needed_by
from tmc_client.forks import watch_forks
from tmc_client.local import LocalTransaction
from tmc_client.local.choosing import is_async_session, is_of_asyncio, local_of
from tmc_client.local.elsewhere import connection_of, refuse_elsewhere, writer_of
from tmc_client.local.engines import Source, engine_of, in_schemas, schemas_of
from tmc_client.outbox.bell import Bell
from tmc_client.outbox.block import OutboxTransaction
from tmc_client.outbox.center_target import CenterTarget
from tmc_client.outbox.direct import DirectSending
from tmc_client.outbox.entries import Draft, Entry, Target, line_of
from tmc_client.outbox.relay import LEASE, Limits, Relay
from tmc_client.outbox.store import ALWAYS_DUE_MS, OutboxStore, columns_of, now_ms
from tmc_client.producing.ledger import known_ledger_id
from tmc_client.producing.producer import Producer, duration, publish_request, refused
from tmc_client.recording import RecordedTransaction
from tmc_client.tables import FAMILY, demand_wide
from tmc_client.tables import outbox as table
from tmc_common import fields
from tmc_common.plugins import installed
from tmc_common.protocol import message_pb2

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

log = logging.getLogger("tmc_client.outbox")

T = TypeVar("T")
UNTOUCHED = timedelta(seconds=3)  # a relay leaves a message to its direct send that long
_KEY = "tmc_outbox"
_SEEN = "tmc_outbox_seen"  # outboxes whose database this transaction is in


_DATABASE = sa.text("SELECT DATABASE()")
_SCHEMAS = {
    "mysql": _DATABASE,
    "mariadb": _DATABASE,
    "postgresql": sa.text(
        "SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass('tmc_outbox')"
    ),
}
"""Queries for the schema that a connection finds our table in, where its connections can be remembered."""


class _Center(Protocol):
    """A tmc_client.Center, which imports this module. Frameworks look up the types of what they construct."""

    @property
    def producer(self) -> Producer: ...


class _Row:
    """Mapped to the table, so that the session writes it with the user's own objects."""

    __module__ = "~"  # a flush goes by names: ours comes last, when the locks of the transaction are taken

    id: int


registry().map_imperatively(_Row, table)


class Outbox:
    """engine: a blocking one of the business database, also in asyncio programs; or a function that returns a new connection
    of a driver.  target: a Center, another target, or its address: amqp://..., kafka://HOST:PORT, or a scheme that is
    installed as an entry point of the group "tmc.outbox_targets", which is called with the address.

    direct: send after the commit, and not by relays only.  untouched: how long a relay leaves a message to that.
    limits: when a message is given up.  lease: after which time another relay takes over from one that died.
    on_given_up: called by the relay with messages that became FAILED, and why.  body_bytes: maximum size of a body, that of the
    target (limits.body_bytes of a center).
    """

    def __init__(
        self,
        engine: Source,
        target: _Center | Target | str,
        *,
        direct: bool = True,
        untouched: timedelta = UNTOUCHED,
        limits: Limits | None = None,
        lease: timedelta = LEASE,
        on_given_up: Callable[[Sequence[Entry], str], None] = lambda _entries, _error: None,
        body_bytes: int = fields.BODY_BYTES,
    ) -> None:
        """Raises InvalidRequest if `engine` is not a blocking one."""
        self.store: OutboxStore = OutboxStore(engine_of(engine, "tmc.Outbox()", pooled=True))
        self._owns_engine = self.store.engine is not engine
        self._target: Target = _target_of(target)
        self._untouched_ms = round(duration("untouched", untouched).total_seconds() * 1000)
        self._limits = limits or Limits()
        self._lease = lease
        self._on_given_up = on_given_up
        self._body_bytes = body_bytes
        self._direct = DirectSending(self.store, self._target) if direct else None
        self._bell = Bell(self.store.engine)
        self._closed = False
        self._schemas: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # of our table, by connection
        self._relay: Relay | None = None
        self._thread: threading.Thread | None = None
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware: the parent's relay runs on there, and its connections are its own."""
        self._relay = self._thread = None
        if self._owns_engine:
            self.store.engine.dispose(close=False)

    def add(
        self,
        session: Session | AsyncSession | scoped_session[Session],
        topic: Topic[T] | str,
        body: T,
        *,
        key: str,
        order_key: str = "",
        headers: Mapping[str, str] | None = None,
        delay: timedelta = timedelta(0),
    ) -> None:
        """Write a message with the next flush of this session: it is sent if and only if its transaction commits.

        order_key: messages of a topic with the same one are sent one after another, in the order of their ids: change what
        they are about, so that it is locked, before or in the same flush.
        Raises InvalidRequest, CodecError.
        """
        request = publish_request(topic, body, key=key, order_key=order_key, headers=headers, delay=delay)
        self.check(request)
        blocking = _blocking(session)
        writer_of(blocking)
        row, columns = _Row(), self._columns(request)
        for name, value in columns.items():
            setattr(row, name, value)
        blocking.add(row)
        blocking.info.setdefault(_KEY, []).append((self, row, columns["attempt_id"], bool(columns["line"])))

    def transaction(self, session: Session | LocalTransaction | Any) -> OutboxTransaction | RecordedTransaction:
        """Open a block that owns the commit of `session`: its messages are sent if and only if it commits.

        session: as for Center.transaction, e.g. a connection of a driver. Raises InvalidRequest for anything else.
        """
        local = local_of(session, "outbox.transaction()")
        return RecordedTransaction(local) if getattr(local, "is_of_a_test", False) else OutboxTransaction(self, local)

    def check(self, request: message_pb2.PublishRequest) -> None:
        """Raise InvalidRequest if this outbox cannot take it."""
        try:
            fields.body(request.body, self._body_bytes)
        except fields.FieldInvalid as exc:
            raise refused(exc) from exc
        if request.delay_ms and not self._target.delays:
            raise errors.InvalidRequest("The target of this outbox knows no delays: leave delay= out.", field="delay")

    def _columns(self, request: message_pb2.PublishRequest) -> dict[str, Any]:
        now, line = now_ms(), line_of(request.topic, request.order_key)
        due_ms = ALWAYS_DUE_MS if line else now + self._untouched_ms
        return columns_of(request, line, created_ms=now, due_ms=due_ms)

    def write(self, local: LocalTransaction, requests: Sequence[message_pb2.PublishRequest]) -> Callable[[], None]:
        """Write messages in a transaction that is about to commit. Returns: what to call after the commit, must not raise.

        Raises InvalidRequest; what the database raises.
        """
        for request in requests:
            self.check(request)
        schema = self._schema_on(local)
        if self.store.engine.dialect.name in FAMILY:
            demand_wide(local.run, *(text for each in requests for text in (each.topic, each.key, each.order_key)))
        rows = [self._columns(request) for request in requests]
        numbered = list(zip(local.insert_outbox(rows, schema), rows, strict=True))
        direct = [Entry.of_columns(number, row) for number, row in numbered if not row["line"]]
        return partial(self.committed, direct, ordered=len(direct) < len(rows))

    def _schema_on(self, local: LocalTransaction) -> str:
        """Return the schema of our table on a connection of the program's; "": it is compared in each transaction.

        Compared once per connection: with the schema in its name the table is ours, wherever the connection is by then.
        """
        query = _SCHEMAS.get(local.dialect.name)
        if local.lasting is None or query is None:
            self._refuse_another_ledger(local)
            return ""
        known = self._schemas.get(local.lasting, "")
        if not known:
            self._refuse_another_ledger(local)
            if self.store.ledger_id():
                known = self._schemas[local.lasting] = local.run(query, {}).fetchone()[0]
        return known

    def _refuse_another_ledger(self, local: LocalTransaction) -> None:
        """Read in each transaction of a session, since its connection may change the schema, e.g. with the tenant."""
        engine = local.engine
        if engine is None or not self._is_the_file_of(engine):
            self._demand_ours(known_ledger_id(local.run), engine)

    def demand_written_here(self, session: Session) -> None:
        """Raise InvalidRequest if its transaction would write messages elsewhere. Called before they are flushed.

        The database is asked: addresses of engines say little, with `creator=`, a pooler or a search_path.
        """
        connection = connection_of(session)
        if connection.dialect.name in FAMILY:
            rows = [row for box, row, *_ in session.info[_KEY] if box is self]
            demand_wide(
                connection.execute, *(text for row in rows for text in (row.topic, row.message_key, row.order_key))
            )
        seen: set[Outbox] = session.info.setdefault(_SEEN, set())
        engine = in_schemas(connection.engine, schemas_of(connection))
        if self not in seen and not self._is_the_file_of(engine):
            self._demand_ours(known_ledger_id(connection.execute), engine)
        seen.add(self)

    def _is_like(self, engine: sa.Engine) -> bool:
        """Return whether it has the same pool and schemas."""
        ours = self.store.engine
        return engine.pool is ours.pool and schemas_of(engine) == schemas_of(ours)

    def _is_the_file_of(self, engine: sa.Engine) -> bool:
        """Return whether an engine is that of our file: on SQLite it has one, and a transaction that reads first
        may be refused its first change.
        """
        return engine.dialect.name == "sqlite" and self._is_like(engine)

    def _demand_ours(self, found: bytes, engine: sa.Engine | None) -> None:
        """A message written elsewhere would not be sent. found: the id of the ledger there.  engine: of the transaction."""
        if engine is not None and self._is_like(engine):
            if not found:
                return  # nobody has asked for it yet
            self.store.believe(found)
        ours = self.store.ledger_id()
        if ours and ours != found:
            raise errors.InvalidRequest(
                "This transaction is of another database, or schema, than the outbox: give each its own outbox."
            )

    def committed(self, messages: Sequence[Draft] | Sequence[Entry], *, ordered: bool) -> None:
        """Send these. ordered: there are others, with an order key; those the relay sends, one after another. Never raises.

        messages: what was certainly committed; drafts, where the database should be asked first.
        """
        try:
            if self._direct is not None and messages:
                self._direct.send(messages)
            if ordered and (self._relay is None or not self._relay.wake()):
                self._bell.ring()
        except Exception:  # the transaction is committed, and the relay sends them
            log.warning("what was committed is left to the relay", exc_info=True)

    def relay(self) -> Relay:
        """A relay for a thread or process of your own: call its `run`."""
        return Relay(self.store, self._target, self._limits, self._lease, self._on_given_up)

    def start(self) -> None:
        """Run a relay in a thread of this process. Of all relays of this database, one works. Raises InvalidRequest."""
        if self._closed:
            raise errors.InvalidRequest("This outbox was closed: make another one.")
        if self._thread is None:
            self._relay = self.relay()
            self._thread = threading.Thread(target=self._relay.run, name="tmc-outbox-relay", daemon=True)
            self._thread.start()

    def flush(self, timeout: timedelta = timedelta(seconds=5)) -> bool:
        """Wait until the direct sends are done. Returns False on timeout."""
        return self._direct is None or self._direct.flush(timeout.total_seconds())

    def close(self) -> None:
        """Finish the direct sends and stop the relay of this process."""
        self._closed = True
        if self._direct is not None:
            self._direct.close()
        if self._relay is not None and self._thread is not None:
            self._relay.stop()
            self._thread.join(10)
        self._bell.close()
        self._target.close()
        if self._owns_engine:
            self.store.engine.dispose()

    def __enter__(self) -> Outbox:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _target_of(given: Any) -> Target:
    """Raises InvalidRequest: it is neither a target nor a Center, nor the address of one."""
    target = _target_at(given) if isinstance(given, str) else given
    if not isinstance(target, type) and all(hasattr(target, name) for name in ("send", "close", "delays")):
        return cast("Target", target)
    producer = getattr(target, "producer", None)
    if isinstance(producer, Producer):
        return CenterTarget(producer)
    raise errors.InvalidRequest(
        f"tmc.Outbox() sends to a Center (of tmc.connect(), also in asyncio programs) or to a target, not to "
        f"{type(target).__name__}."
    )


def _target_at(address: str) -> Any:
    """Raises InvalidRequest: nothing is installed for its scheme."""
    scheme = address.partition("://")[0]
    known = installed("tmc.outbox_targets")
    if scheme not in known:
        raise errors.InvalidRequest(
            f"tmc.Outbox() knows no target for {scheme}://: installed are {', '.join(sorted(known)) or 'none'}."
        )
    with needed_by(f"The target of {scheme}://"):
        return known[scheme].load()(address)


def _blocking(session: Any) -> Session:
    """The Session behind it. Raises InvalidRequest."""
    found = session
    if isinstance(found, scoped_session) or (is_of_asyncio(found) and callable(found)):
        found = found()
    if is_async_session(found):
        found = found.sync_session
    if not isinstance(found, Session):
        raise errors.InvalidRequest(
            f"outbox.add() takes a Session or an AsyncSession, not {type(session).__name__}: over a connection, write "
            "`with outbox.transaction(connection) as tx` and tx.send()."
        )
    return found


@event.listens_for(Session, "before_flush")
def _before_flush(session: Session, *_: object) -> None:
    for box in {box for box, *_ in session.info.get(_KEY, ())}:
        box.demand_written_here(session)


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    if _KEY in session.info and not session.in_nested_transaction():
        session.flush()
        refuse_elsewhere(session, "a message")


@event.listens_for(Session, "after_commit", insert=True)  # what a listener of the program's raises hides no commit
def _after_commit(session: Session) -> None:
    if _KEY not in session.info or session.in_nested_transaction():
        return
    found: dict[Outbox, list[tuple[Draft, bool]]] = {}
    for box, row, attempt_id, ordered in session.info.pop(_KEY):
        state = sa.inspect(row)
        if state.persistent and state.identity is not None:  # not of a savepoint that was rolled back
            found.setdefault(box, []).append((Draft(id=state.identity[0], attempt_id=attempt_id), ordered))
    for box, rows in found.items():
        box.committed([draft for draft, ordered in rows if not ordered], ordered=any(ordered for _, ordered in rows))


@event.listens_for(Session, "after_transaction_end")
def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        session.info.pop(_KEY, None)  # of a transaction that was rolled back
        session.info.pop(_SEEN, None)
