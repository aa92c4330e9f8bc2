"""A database that was away is asked for the newest message, whatever was committed after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from tmc_server.domain.ids import MessageId, first_number
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import NO_SUBSCRIPTION, MessageNumber, Shard
from tmc_server.domain.operations import Done, Stored
from tmc_server.metrics import METRICS
from tmc_server.store.engines import Database
from tmc_server.store.failover import Witness
from tmc_server.store.tables import shard_tables

_SHARD = Shard(7)
_NOW_MS = 1_800_000_000_000
_NEWEST = MessageNumber(first_number(_NOW_MS - 1000) + 5)


@pytest.fixture
def database(tmp_path: object) -> Iterator[Database]:
    """With the newest message alone; its other columns do not matter here."""
    made = Database(f"sqlite:///{tmp_path}/tmc.db", clock=lambda: _NOW_MS)
    with made.transaction() as connection:
        name = shard_tables(_SHARD).message.name
        connection.exec_driver_sql(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY)")
        connection.exec_driver_sql(f"INSERT INTO {name} VALUES ({_NEWEST})")
    yield made
    made.close()


def _stored(number: int, *, changed: bool = True) -> Stored:
    id_ = MessageId(1, 1, _SHARD, MessageNumber(number))
    return Stored(message_id=id_, state=MessageState.PREPARED, changed=changed)


def _looked(database: Database, witness: Witness) -> int:
    """How often the loss was counted."""
    before = _count()
    with database.connection() as connection:
        witness.look(connection)
        witness.look(connection)
    return _count() - before


def _count() -> int:
    return int(METRICS.registry.get_sample_value("tmc_commits_lost_total") or 0)


def test_a_message_that_is_gone_is_counted_once(database: Database) -> None:
    witness = Witness(database)
    witness.note(_SHARD, [_stored(_NEWEST), _stored(_NEWEST + 1)])
    for _ in range(200):
        witness.note(_SHARD, [Done(subscription=NO_SUBSCRIPTION)])
    witness.note(_SHARD, [_stored(_NEWEST)])  # a decision on an older one
    assert _looked(database, witness) == 1


def test_what_is_there_or_was_never_stored_is_not_missed(database: Database) -> None:
    witness = Witness(database)
    assert _looked(database, witness) == 0
    witness.note(_SHARD, [_stored(_NEWEST), _stored(_NEWEST + 1, changed=False)])
    assert _looked(database, witness) == 0


def test_a_shard_that_moved_is_not_missed(database: Database) -> None:
    witness = Witness(database)
    witness.note(_SHARD, [_stored(_NEWEST + 1)])
    with database.transaction() as connection:
        connection.exec_driver_sql(f"DROP TABLE {shard_tables(_SHARD).message.name}")
    assert _looked(database, witness) == 0


def test_what_retention_may_have_removed_is_not_missed(database: Database) -> None:
    witness = Witness(database)
    witness.note(_SHARD, [_stored(first_number(_NOW_MS - 3_600_000))])
    assert _looked(database, witness) == 0


def test_a_look_that_fails_is_repeated(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = Witness(database)
    witness.note(_SHARD, [_stored(_NEWEST + 1)])
    with database.connection() as connection, monkeypatch.context() as patch:
        patch.setattr(sa.Connection, "scalar", _fail)
        with pytest.raises(OSError, match="cut"):
            witness.look(connection)
    assert _looked(database, witness) == 1


def _fail(*_: object) -> None:
    raise OSError("cut")
