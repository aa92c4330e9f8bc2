"""A shard moves between databases of two kinds under traffic, and the command that moves it is killed again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from tests.support.cluster import Cluster
from tests.support.dose import LONG
from tests.support.shard_traffic import ShardTraffic, kill_moves, move
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.store.engines import Database
from tmc_server.store.tables import shard_tables
from tmc_storm.services.postgresql import PostgreSQL

pytestmark = [pytest.mark.mariadb, pytest.mark.postgresql, pytest.mark.services, pytest.mark.timeout(900)]

SHARD = 7
KILLS = 30 if LONG else 4


@pytest.fixture
def cluster(postgresql: PostgreSQL) -> Iterator[Cluster]:
    with Cluster(servers=2, TMC_STORE__SPARE=f'["{postgresql.create("tmc_spare")}"]') as made:
        made.shared(2)
        yield made


def _states(url: str) -> Counter[str] | None:
    """Return deliveries by state. None: the shard is not there."""
    database = Database(url)
    consumption = shard_tables(SHARD).consumption
    with database.reading() as connection:
        if not sa.inspect(connection).has_table(consumption.name):
            states = None
        else:
            states = connection.execute(sa.select(consumption.c.state)).scalars().all()
    database.close()
    return None if states is None else Counter(ConsumptionState(state).name for state in states)


@pytest.mark.takes_turns("killed servers")
def test_a_shard_moves_there_and_back_under_traffic(cluster: Cluster, note: Callable[[str], None]) -> None:
    there = cluster.settings["TMC_STORE__SPARE"][2:-2]
    traffic = ShardTraffic(cluster, shard=SHARD, threads=4, batch=1, per_s=200 if LONG else 80)
    try:
        killed = kill_moves(cluster, traffic, to="tmc_spare", kills=KILLS, longest_s=3.0, undo_each=4)
        said = move(cluster, SHARD, "--to", "tmc_spare")
        traffic.goes_on(100)
        move(cluster, SHARD, "--confirm")
        back = move(cluster, SHARD, "--to", "tmc_cluster")
        traffic.goes_on(100)
    finally:
        traffic.stop()
    note(f"{traffic.count} messages, {killed} kills. {said} {back}")
    assert killed >= KILLS // 2
    assert traffic.failed == []
    assert _states(cluster.databases[0].url("tmc_cluster")) == {"ACKED": traffic.count}
    assert _states(there) is None
    assert (traffic.lost, traffic.out_of_order) == (0, 0)
