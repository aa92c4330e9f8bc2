"""Every table, as SQLAlchemy Core metadata. A new database gets them all at once, an older one by migrations.

Times are epoch milliseconds by the database's clock. Text compares by bytes (utf8mb4_bin); outer spaces, which such a
collation would ignore, are refused at the edge. Due columns are NULL when nothing is due, so that a scan touches
only what is due.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.types import TypeEngine

from tmc_server.domain.catalog import TopicSettings
from tmc_server.domain.numbers import Shard
from tmc_server.domain.placement import SHARDS
from tmc_server.domain.retry import RetryPolicy
from tmc_server.store.records import columns_for

METADATA = sa.MetaData()
_OPTIONS: dict[str, Any] = {
    f"{family}_{name}": value
    for family in ("mysql", "mariadb")
    for name, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}
FAMILY = ("mysql", "mariadb")
# Each row of a shard changes three to five times and goes: PostgreSQL looks for dead ones when they are a fiftieth, not a fifth.
_VACUUMED_OFTEN: dict[str, Any] = {
    "postgresql_with": {"autovacuum_vacuum_scale_factor": 0.02, "autovacuum_analyze_scale_factor": 0.05}
}


def binary(length: int) -> TypeEngine[bytes]:
    """Bytes of one exact length."""
    return sa.LargeBinary(length).with_variant(mysql.BINARY(length), *FAMILY)


def _text(length: int) -> sa.String:
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


_LONG_TEXT: TypeEngine[str] = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def _ms(name: str, nullable: bool = False, server_default: str | None = None) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable, server_default=server_default)


def _serial() -> sa.Column[int]:
    return sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True)


def _due_index(name: str, of: str) -> sa.Index:
    """Index what is due, by its topic or subscription; in PostgreSQL, only rows with a due time."""
    return sa.Index(name, of, "due_ms", postgresql_where=sa.text("due_ms IS NOT NULL"))


_BODY: TypeEngine[bytes] = sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), *FAMILY)

meta = sa.Table(
    "tmc_meta",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("catalog_version", sa.BigInteger, nullable=False),
    **_OPTIONS,
)

operator = sa.Table(
    "tmc_operator",
    METADATA,
    sa.Column("name", _text(64), primary_key=True),
    sa.Column("token_hash", binary(32), nullable=False),
    _ms("created_ms"),
    sa.Column("role", sa.SmallInteger, nullable=False, server_default="3"),
    sa.Column("topics", _text(1000), nullable=False, server_default="[]"),  # JSON, prefixes; none: all topics
    sa.Column("reads_bodies", sa.SmallInteger, nullable=False, server_default="1"),
    _ms("expires_ms", nullable=True),
    sa.Column("old_token_hash", binary(32)),
    _ms("old_expires_ms", nullable=True),
    sa.Column("identities", _text(1000), nullable=False, server_default="[]"),  # JSON, what identifies besides tokens
    **_OPTIONS,
)

# Calls that wait for a second operator, or did. request: serialized.  digest: of the call without its reason.
proposal = sa.Table(
    "tmc_proposal",
    METADATA,
    _serial(),
    sa.Column("action", _text(32), nullable=False),
    sa.Column("topic", _text(128), nullable=False),
    sa.Column("subject", _text(500), nullable=False),
    sa.Column("request", sa.LargeBinary, nullable=False),
    sa.Column("digest", binary(32), nullable=False),
    sa.Column("actor", _text(64), nullable=False),
    sa.Column("reason", _text(500), nullable=False),
    _ms("created_ms"),
    _ms("expires_ms"),
    sa.Column("state", sa.SmallInteger, nullable=False),
    sa.Column("decided_by", _text(64), nullable=False, server_default=""),
    _ms("decided_ms", server_default="0"),
    sa.Column("decision_reason", _text(500), nullable=False, server_default=""),
    sa.Index("tmc_proposal_pending", "state", "expires_ms"),
    **_OPTIONS,
)

app = sa.Table(
    "tmc_app",
    METADATA,
    sa.Column("app_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("id", _text(64), nullable=False, unique=True),
    sa.Column("service_name", _text(128), nullable=False),
    sa.Column("biz_id", _text(128), nullable=False),
    sa.Column("alert_email", _text(255), nullable=False),
    sa.Column("alert_phone", _text(64), nullable=False),
    sa.Column("key_hash", binary(32), nullable=False),
    sa.Column("old_key_hash", binary(32)),
    _ms("created_ms"),
    sa.Column("check_token", _text(64), nullable=False, server_default=""),
    sa.Column("disabled", sa.SmallInteger, nullable=False, server_default="0"),  # 1: its calls are refused
    **_OPTIONS,
)

# Keys that work in one environment only; those in tmc_app work in all.
app_key = sa.Table(
    "tmc_app_key",
    METADATA,
    sa.Column("app_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("tag", _text(64), primary_key=True),
    sa.Column("key_hash", binary(32), nullable=False),
    sa.Column("old_key_hash", binary(32)),
    _ms("created_ms"),
    **_OPTIONS,
)

# Queues of a broker from which messages are taken. Secrets in hexadecimal, "" where there is none.
submit_queue = sa.Table(
    "tmc_submit_queue",
    METADATA,
    sa.Column("app_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("tag", _text(64), primary_key=True),
    sa.Column("secret", _text(64), nullable=False, server_default=""),
    sa.Column("old_secret", _text(64), nullable=False, server_default=""),
    _ms("created_ms"),
    **_OPTIONS,
)

topic = sa.Table(
    "tmc_topic",
    METADATA,
    sa.Column("topic_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", _text(128), nullable=False, unique=True),
    sa.Column("owner_no", sa.Integer, nullable=False),
    sa.Column("default_tag", _text(64), nullable=False),
    _ms("effective_ms"),
    sa.Column("paused", sa.SmallInteger, nullable=False, server_default="0"),  # 1: nothing is delivered
    *columns_for(TopicSettings),
    *columns_for(RetryPolicy, "check_"),  # delays and limit for UNKNOWN answers to checks
    **_OPTIONS,
)

# The approved ways to ask about a topic's messages; a topic without any has the usual one.
check_target = sa.Table(
    "tmc_check_target",
    METADATA,
    sa.Column("topic_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", _text(32), primary_key=True),
    sa.Column("kind", _text(32), nullable=False),
    sa.Column("address", _text(255), nullable=False),
    sa.Column("options", _LONG_TEXT, nullable=False),  # JSON object of strings
    sa.Column("deadline_ms", sa.Integer, nullable=False),
    sa.Column("concurrency", sa.Integer, nullable=False),
    sa.Column("batch", sa.Integer, nullable=False),
    sa.Column("tls", sa.SmallInteger, nullable=False),
    **_OPTIONS,
)

subscription = sa.Table(
    "tmc_subscription",
    METADATA,
    sa.Column("subscription_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("topic_no", sa.Integer, nullable=False),
    sa.Column("app_no", sa.Integer, nullable=False),
    sa.Column("tag", _text(64), nullable=False),
    *columns_for(RetryPolicy),
    _ms("effective_ms"),
    _ms("removed_ms", nullable=True),
    # Where a forwarding subscription sends; all empty: to a queue of its own.
    sa.Column("forward_kind", _text(32), nullable=False, server_default=""),
    sa.Column("forward_target", _text(255), nullable=False, server_default=""),
    sa.Column("forward_key", _text(255), nullable=False, server_default=""),
    sa.Column("live", sa.SmallInteger, server_default="1"),  # 1, or NULL once removed: then the name is free
    _ms("leaving_ms", nullable=True),  # when its removal was asked for; until it is removed it can be taken back
    # Secrets, 64 hex digits each; empty: none. Copies are signed with delivery_key, other_key is accepted as well.
    sa.Column("delivery_key", _text(64), nullable=False, server_default=""),
    sa.Column("other_key", _text(64), nullable=False, server_default=""),
    sa.Column("order_mode", sa.SmallInteger, nullable=False, server_default="1"),  # see domain.ordering.OrderMode
    sa.Column("paused", sa.SmallInteger, nullable=False, server_default="0"),  # 1: nothing is delivered
    sa.UniqueConstraint("topic_no", "app_no", "tag", "live", name="tmc_subscription_name"),
    **_OPTIONS,
)

# One row per node slot that was ever used. high_ms: no message number of this slot carries a later time.
node_slot = sa.Table(
    "tmc_node_slot",
    METADATA,
    sa.Column("slot", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("owner", _text(128), nullable=False),
    _ms("expires_ms"),
    _ms("high_ms"),
    **_OPTIONS,
)

# Heartbeats: one row per server run. After expires_ms it is gone, and what it handed over last is handed over again.
# catalog_version: of the copy it uses, as far as it said so.  stale_ms: it submits with a copy up to this age.
# silenced: 0; 1: it may not look at the catalog any more; 2: for so long that it cannot submit (store/activation.py).
server = sa.Table(
    "tmc_server",
    METADATA,
    sa.Column("incarnation", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("name", _text(128), nullable=False),
    _ms("started_ms"),
    _ms("expires_ms"),
    sa.Column("catalog_version", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("stale_ms", sa.BigInteger, nullable=False, server_default="60000"),
    sa.Column("silenced", sa.SmallInteger, nullable=False, server_default="0"),
    sa.Column("drained", sa.SmallInteger, nullable=False, server_default="0"),  # 1: it looks after no shards
    _ms("seen_ms", server_default="0"),  # this database's time at its last heartbeat
    # Identities of the databases in its configuration, with spaces between; NULL: of a program that follows no moves.
    sa.Column("known_databases", _LONG_TEXT),
    **_OPTIONS,
)

# Which database holds which shard, by the identity in its tmc_database.  place: where it was then, for people.
shard_map = sa.Table(
    "tmc_shard_map",
    METADATA,
    sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("identity", _text(32), nullable=False),
    sa.Column("place", _text(255), nullable=False),
    **_OPTIONS,
)

# Shards on their way to another database, and those that are there and still kept where they were (store/moving.py).
# source, target: identities.  run: random, of the command that works on it.  position: JSON, the last key copied by table.
shard_move = sa.Table(
    "tmc_shard_move",
    METADATA,
    sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("source", _text(32), nullable=False),
    sa.Column("target", _text(32), nullable=False),
    sa.Column("run", _text(32), nullable=False),
    sa.Column("step", sa.SmallInteger, nullable=False),  # see domain.placement.MoveStep
    sa.Column("position", _LONG_TEXT, nullable=False),
    sa.Column("copied", sa.BigInteger, nullable=False),
    sa.Column("expected", sa.BigInteger, nullable=False),  # rows, about
    _ms("started_ms"),
    _ms("updated_ms"),
    **_OPTIONS,
)

# Queue progress seen by each server run: acks may reach one server while another one holds copies back.
queue_progress = sa.Table(
    "tmc_queue_progress",
    METADATA,
    sa.Column("queue", _text(255), primary_key=True),
    sa.Column("incarnation", sa.BigInteger, primary_key=True, autoincrement=False),
    _ms("passed_ms"),
    sa.Column("moves", sa.BigInteger, nullable=False),
    _ms("updated_ms"),
    **_OPTIONS,
)

# Messages that a server run submitted (subscription 0) or acked (topic 0) within its last window.
traffic = sa.Table(
    "tmc_traffic",
    METADATA,
    sa.Column("incarnation", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("topic_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("subscription_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("messages", sa.BigInteger, nullable=False),
    _ms("window_ms"),
    _ms("updated_ms"),
    **_OPTIONS,
)

# Where a producer was last seen, for centers without service discovery.  ledger_id: the one it answers for, if it said so.
sender = sa.Table(
    "tmc_sender",
    METADATA,
    sa.Column("app_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("tag", _text(64), primary_key=True),
    sa.Column("address", _text(255), primary_key=True),
    _ms("seen_ms"),
    sa.Column("ledger_id", sa.LargeBinary(16).with_variant(mysql.VARBINARY(16), *FAMILY)),
    **_OPTIONS,
)

# Who this database is: one row with random text, whatever its address.  serves_from: revision of the oldest program
# that works with these tables.
database_identity = sa.Table(
    "tmc_database",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("identity", _text(32), nullable=False),
    sa.Column("serves_from", _text(32), nullable=False, server_default=""),
    **_OPTIONS,
)

# Who looks after the due rows of a shard. owner: incarnation of a server run, 0: nobody. epoch: grows with every owner.
lease = sa.Table(
    "tmc_lease",
    METADATA,
    sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("owner", sa.BigInteger, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    _ms("expires_ms"),
    _ms("seen_ms", server_default="0"),  # this database's time when it was taken or renewed
    **_OPTIONS,
)

# Attempts that were rolled back: their Prepare, if it is still on its way, is refused.
tombstone = sa.Table(
    "tmc_tombstone",
    METADATA,
    sa.Column("attempt_id", binary(16), primary_key=True),
    sa.Column("topic_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("producer_tag", _text(64), primary_key=True),
    sa.Column("message_key", _text(128), primary_key=True),
    _ms("created_ms"),
    **_OPTIONS,
)

# What the retention duty has removed. horizon_ms: closed messages from before it may be gone, never goes back.
# run, position: progress through the archive's lists; "" and 0: none yet.
retention = sa.Table(
    "tmc_retention",
    METADATA,
    sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
    _ms("horizon_ms"),
    sa.Column("run", _text(64), nullable=False),
    sa.Column("position", sa.BigInteger, nullable=False),
    **_OPTIONS,
)

# Alert outbox: written with the change it tells of, sent by duties/alerting.
alert = sa.Table(
    "tmc_alert",
    METADATA,
    _serial(),
    sa.Column("kind", _text(32), nullable=False),
    sa.Column("topic_no", sa.Integer, nullable=False),
    sa.Column("shard", sa.SmallInteger, nullable=False),
    sa.Column("message_id", sa.BigInteger, nullable=False),
    sa.Column("subscription_no", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("detail", _text(500), nullable=False),
    _ms("created_ms"),
    _ms("sent_ms", nullable=True),
    sa.Column("fingerprint", _text(12), nullable=False, server_default=""),
    sa.UniqueConstraint("kind", "message_id", "subscription_no", "attempt", name="tmc_alert_episode"),
    sa.Index("tmc_alert_unsent", "sent_ms", "id"),
    **_OPTIONS,
)

# Alerts of one kind, topic, subscription and fingerprint, until their cause is gone. open: 1, or NULL once resolved: at most
# one of each is open.  detail, samples: of the first alerts.  empty_ms: since when nothing is left of it; NULL: something is.
episode = sa.Table(
    "tmc_episode",
    METADATA,
    _serial(),
    sa.Column("kind", _text(32), nullable=False),
    sa.Column("topic_no", sa.Integer, nullable=False),
    sa.Column("subscription_no", sa.Integer, nullable=False),
    sa.Column("fingerprint", _text(12), nullable=False),
    sa.Column("open", sa.SmallInteger),
    sa.Column("detail", _text(500), nullable=False),
    sa.Column("samples", _text(500), nullable=False),  # JSON list of [shard, message number]
    sa.Column("alerts", sa.BigInteger, nullable=False),
    _ms("first_ms"),
    _ms("last_ms"),
    _ms("acknowledged_ms", nullable=True),
    sa.Column("acknowledged_by", _text(64), nullable=False, server_default=""),
    _ms("empty_ms", nullable=True),
    _ms("resolved_ms", nullable=True),
    sa.UniqueConstraint("kind", "topic_no", "subscription_no", "fingerprint", "open", name="tmc_episode_open"),
    sa.Index("tmc_episode_still", "open", "id"),
    **_OPTIONS,
)

# Notices of alerts: one row per sink, grouped. due_ms: when it is sent or retried; NULL once it was sent.
# claim: 0, or the random number of the server run that sends it until due_ms; while it is 0, further alerts are added to it.
notice = sa.Table(
    "tmc_notice",
    METADATA,
    _serial(),
    sa.Column("sink", _text(32), nullable=False),
    sa.Column("kind", _text(32), nullable=False),
    sa.Column("topic_no", sa.Integer, nullable=False),
    sa.Column("subscription_no", sa.Integer, nullable=False),
    sa.Column("shard", sa.SmallInteger, nullable=False),
    sa.Column("message_id", sa.BigInteger, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("detail", _text(500), nullable=False),
    sa.Column("samples", _text(500), nullable=False),  # JSON list of [shard, message number]
    sa.Column("alerts", sa.Integer, nullable=False),  # how many
    _ms("first_ms"),
    _ms("last_ms"),
    sa.Column("claim", sa.BigInteger, nullable=False),
    _ms("due_ms", nullable=True),
    _ms("sent_ms", nullable=True),
    sa.Column("episode_id", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("event", sa.SmallInteger, nullable=False, server_default="1"),  # see domain.alerts.NoticeEvent
    sa.UniqueConstraint("kind", "topic_no", "subscription_no", "sink", "id", name="tmc_notice_group"),
    sa.Index("tmc_notice_due", "sink", "due_ms"),
    **_OPTIONS,
)

# What waits for a human: FAILED deliveries, and CHECK_FAILED messages under subscription 0. Kept with the state changes, so
# that they are counted without a look at closed rows; most messages never come here.
failed = sa.Table(
    "tmc_failed",
    METADATA,
    sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("topic_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("subscription_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("message_id", sa.BigInteger, primary_key=True, autoincrement=False),
    _ms("failed_ms"),
    sa.Column("fingerprint", _text(12), nullable=False, server_default=""),  # of the error, see domain.fingerprint
    sa.Index("tmc_failed_fingerprint", "topic_no", "subscription_no", "fingerprint"),
    **_OPTIONS,
)

# What operators do to many deliveries. dry_run: the id of the dry run, so that no job is started twice from one.
# selection: JSON, see store/bulk_jobs.py.  agreed: what the dry run counted.
bulk_job = sa.Table(
    "tmc_bulk_job",
    METADATA,
    _serial(),
    sa.Column("dry_run", _text(64), nullable=False, unique=True),
    sa.Column("action", sa.SmallInteger, nullable=False),
    sa.Column("selection", _LONG_TEXT, nullable=False),
    sa.Column("agreed", sa.BigInteger, nullable=False),
    sa.Column("rate", sa.Integer, nullable=False),
    sa.Column("actor", _text(64), nullable=False),
    sa.Column("reason", _text(500), nullable=False),
    _ms("created_ms"),
    _ms("start_ms"),
    _ms("stopped_ms", nullable=True),
    _ms("finished_ms", nullable=True),
    **_OPTIONS,
)

# No notices of these alerts until then. kind "", numbers 0: any.
silence = sa.Table(
    "tmc_silence",
    METADATA,
    _serial(),
    sa.Column("kind", _text(32), nullable=False),
    sa.Column("topic_no", sa.Integer, nullable=False),
    sa.Column("subscription_no", sa.Integer, nullable=False),
    _ms("until_ms"),
    sa.Column("actor", _text(64), nullable=False),
    sa.Column("reason", _text(500), nullable=False),
    **_OPTIONS,
)

# How far a job has come in a shard: behind this message of this subscription. Written with what the job changes.
bulk_progress = sa.Table(
    "tmc_bulk_progress",
    METADATA,
    sa.Column("job_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("subscription_no", sa.Integer, nullable=False),
    sa.Column("message_id", sa.BigInteger, nullable=False),
    sa.Column("done", sa.BigInteger, nullable=False),
    sa.Column("unchanged", sa.BigInteger, nullable=False),
    sa.Column("refused", sa.BigInteger, nullable=False),
    sa.Column("finished", sa.SmallInteger, nullable=False),  # 1: nothing is left; 2: and its outcomes are forgotten
    _ms("updated_ms"),
    **_OPTIONS,
)

# What a job did to each delivery, written in the transaction that did it.
bulk_item = sa.Table(
    "tmc_bulk_item",
    METADATA,
    sa.Column("job_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("message_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("subscription_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("outcome", sa.SmallInteger, nullable=False),
    sa.Column("detail", _text(200), nullable=False),
    _ms("at_ms"),
    sa.Index("tmc_bulk_item_message", "message_id"),
    **_OPTIONS,
)

# One row per order key and subscription: its lock, the delivery whose turn it is (0: none), the last sequence given.
order = sa.Table(
    "tmc_order",
    METADATA,
    sa.Column("subscription_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("order_hash", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("head_id", sa.BigInteger, nullable=False),
    sa.Column("last_sequence", sa.BigInteger, nullable=False),
    sa.Column("shard", sa.SmallInteger, nullable=False),  # that of the subscription's topic, for moving it
    **_OPTIONS,
)

# The WAITING consumptions, in the order in which their turns come. due_ms: not before this time.
waiting = sa.Table(
    "tmc_waiting",
    METADATA,
    sa.Column("subscription_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("order_hash", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("message_id", sa.BigInteger, nullable=False),
    _ms("due_ms"),
    sa.Column("shard", sa.SmallInteger, nullable=False),
    **_OPTIONS,
)

# What operators changed, written in the transaction of the change.
audit = sa.Table(
    "tmc_audit",
    METADATA,
    _serial(),
    _ms("at_ms"),
    sa.Column("actor", _text(64), nullable=False),
    sa.Column("action", _text(64), nullable=False),
    sa.Column("subject", _text(300), nullable=False),
    sa.Column("reason", _text(500), nullable=False),
    sa.Column("origin", _text(64), nullable=False, server_default=""),
    sa.Column("change_text", _text(2000), nullable=False, server_default=""),
    # The chain, see store/audit_seals.py. NULL: not sealed yet.
    sa.Column("seal_no", sa.BigInteger),
    sa.Column("seal", binary(32)),
    sa.Index("tmc_audit_subject", "subject"),
    sa.Index("tmc_audit_seal_no", "seal_no", unique=True),
    **_OPTIONS,
)

# The end of the chain of seals: one row.
audit_head = sa.Table(
    "tmc_audit_head",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("seal_no", sa.BigInteger, nullable=False),
    sa.Column("seal", binary(32), nullable=False),
    **_OPTIONS,
)

# In the database of the catalog. audit, audit_head and database_identity are in every database.
CATALOG_TABLES = (
    meta,
    operator,
    app,
    app_key,
    submit_queue,
    topic,
    check_target,
    subscription,
    node_slot,
    server,
    shard_map,
    shard_move,
    queue_progress,
    traffic,
    sender,
    bulk_job,
    silence,
    proposal,
    audit,
    audit_head,
    database_identity,
)
# In every database that holds shards.
DATABASE_TABLES = (
    lease,
    retention,
    tombstone,
    alert,
    episode,
    notice,
    failed,
    order,
    waiting,
    bulk_progress,
    bulk_item,
    audit,
    audit_head,
    database_identity,
)


@dataclass(frozen=True, kw_only=True)
class ShardTables:
    """The tables of one shard."""

    shard: Shard
    message: sa.Table
    consumption: sa.Table
    attempt: sa.Table

    @property
    def all(self) -> tuple[sa.Table, ...]:
        return (self.message, self.consumption, self.attempt)


_shards: dict[Shard, ShardTables] = {}
_building = threading.Lock()


def shard_tables(shard: Shard) -> ShardTables:
    """shard: 0 <= shard < 32. Built at first use, by one thread: a table can be defined once only."""
    if shard not in _shards:
        with _building:
            if shard not in _shards:
                _shards[shard] = _build(shard)
    return _shards[shard]


def _build(shard: Shard) -> ShardTables:
    if not 0 <= shard < SHARDS:
        raise ValueError(f"no shard {shard}")
    nn = f"{shard:02d}"
    message = sa.Table(
        f"tmc_message_{nn}",
        METADATA,
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("topic_no", sa.Integer, nullable=False),
        sa.Column("producer_no", sa.Integer, nullable=False),
        sa.Column("producer_tag", _text(64), nullable=False),
        sa.Column("message_key", _text(128), nullable=False),
        sa.Column("live", sa.SmallInteger),  # 1, or NULL once rolled back: then the key is free
        sa.Column("attempt_id", binary(16), nullable=False),
        sa.Column("ledger_id", binary(16)),
        sa.Column("digest", binary(32), nullable=False),
        sa.Column("state", sa.SmallInteger, nullable=False),
        sa.Column("content_type", _text(100), nullable=False),
        sa.Column("headers", _LONG_TEXT),  # JSON object, NULL when there are none
        sa.Column("body", _BODY, nullable=False),
        _ms("delay_ms"),
        _ms("due_ms", nullable=True),  # when the producer is asked; NULL once decided
        _ms("created_ms"),
        _ms("decided_ms", nullable=True),
        sa.Column(
            "check_target", _text(32), nullable=False, server_default=""
        ),  # which of the topic's; "": the usual one
        # State of checks: their number, never reset; UNKNOWN answers so far; since when the service was unreachable.
        sa.Column("check_attempt", sa.Integer, nullable=False, server_default="0"),
        sa.Column("checked", sa.Integer, nullable=False, server_default="0"),
        _ms("unreached_ms", nullable=True),
        sa.Column("check_answer", _text(500), nullable=False, server_default=""),  # the last that decided nothing
        _ms("since_ms", nullable=True),  # when its checks were reactivated; NULL: their age counts from created_ms
        # Prepare: at most one live message per key.
        sa.UniqueConstraint("topic_no", "producer_tag", "message_key", "live", name=f"tmc_message_{nn}_key"),
        # Checks and the open limit: undecided messages of a topic.
        _due_index(f"tmc_message_{nn}_due", "topic_no"),
        **_OPTIONS,
        **_VACUUMED_OFTEN,
    )
    consumption = sa.Table(
        f"tmc_consumption_{nn}",
        METADATA,
        sa.Column("message_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("subscription_no", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("state", sa.SmallInteger, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("tried", sa.Integer, nullable=False),
        _ms("due_ms", nullable=True),
        sa.Column("incarnation", sa.BigInteger),  # which server run made the last attempt
        _ms("created_ms"),
        _ms("closed_ms", nullable=True),
        _ms("tried_ms", nullable=True),  # when the last copy was handed over; NULL: answered, or not delivered
        # For messages with an order key: the line they stand in, and their place; NULL: delivered out of order.
        sa.Column("order_hash", sa.BigInteger),
        sa.Column("sequence", sa.BigInteger),
        sa.Column("extended", sa.Integer, nullable=False, server_default="0"),  # how often, in the current attempt
        _ms("since_ms", nullable=True),  # when its budget of attempts began; NULL: at created_ms
        # The run of a handler that began the current attempt; 0: none did, as far as anybody knows: an attempt that nobody
        # began uses up no retry.  -1: it was nacked or taken back.
        sa.Column("begun", sa.BigInteger, nullable=False, server_default="0"),
        # Redelivery, one subscription at a time: a subscriber that is away costs one look, not one per row.
        _due_index(f"tmc_consumption_{nn}_due", "subscription_no"),
        **_OPTIONS,
        **_VACUUMED_OFTEN,
    )
    attempt = sa.Table(
        f"tmc_attempt_{nn}",
        METADATA,
        _serial(),
        sa.Column("message_id", sa.BigInteger, nullable=False),
        sa.Column("subscription_no", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        _ms("at_ms"),
        sa.Column("incarnation", sa.BigInteger, nullable=False),  # which server run wrote it
        sa.Column("error", _text(500), nullable=False),
        _ms("tried_ms", nullable=True),  # when the attempt was handed over; NULL: not known, or a check
        sa.Column("tried_by", sa.BigInteger),  # by which server run
        sa.Column("unanswered", sa.SmallInteger, nullable=False, server_default="0"),  # 1: nobody said anything
        sa.Index(f"tmc_attempt_{nn}_message", "message_id"),
        **_OPTIONS,
    )
    return ShardTables(shard=shard, message=message, consumption=consumption, attempt=attempt)
