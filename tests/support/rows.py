"""Committed messages with a consumption row each, made by the database."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa

from tests.support.cluster import Cluster
from tests.support.series import Series
from tmc_common.protocol import admin_pb2
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ids import first_number


class Rows:
    """One topic in the shards from `table_index` on, spread evenly."""

    def __init__(self, cluster: Cluster, topic: str, subscription: Any) -> None:
        topics = cluster.admin("ListTopics", admin_pb2.ListTopicsRequest(page_size=1_000)).topics
        apps = cluster.admin("ListApps", admin_pb2.ListAppsRequest()).apps
        self.topic = next(each for each in topics if each.name == topic)
        self.owner = next(each.number for each in apps if each.id == self.topic.owner)
        self.subscription = subscription.number
        self.engine = sa.create_engine(cluster.databases[0].url("tmc_cluster"), isolation_level="AUTOCOMMIT")
        self._series = Series(self.engine)
        self._next = int(first_number(int(time.time() * 1000) - 3_600_000))

    @property
    def shards(self) -> list[int]:
        return [(self.topic.table_index + part) % 32 for part in range(self.topic.spread)]

    def fill(self, count: int, state: ConsumptionState, due_ms: str) -> None:
        """Rows that were tried once, a minute ago. due_ms: SQL; FAILED ones are in the table of failures too."""
        each = count // len(self.shards)
        for shard in self.shards:
            first, nn = self._next, f"{shard:02d}"
            self._next += each
            series, number = self._series, f"({first} + seq)"
            now, some = series.now, f"FROM {series.source(each)}"
            with self.engine.connect() as connection:
                connection.exec_driver_sql(
                    f"INSERT INTO tmc_message_{nn} (id, topic_no, producer_no, producer_tag, message_key, live, attempt_id,"
                    " digest, state, content_type, body, delay_ms, created_ms, decided_ms)"
                    f" SELECT {number}, {self.topic.number}, {self.owner}, 'default', CONCAT('k-', {number}), 1,"
                    f" {series.attempt_id(number)}, {series.digest('seq')}, 2, 'text/plain', {series.body}, 0,"
                    f" {now} - 60000, {now} - 60000 {some}"
                )
                connection.exec_driver_sql(
                    f"INSERT INTO tmc_consumption_{nn} (message_id, subscription_no, state, attempt, tried, due_ms, created_ms)"
                    f" SELECT {number}, {self.subscription}, {int(state)}, 1, 1, {due_ms}, {now} - 60000 {some}"
                )
                if state is ConsumptionState.FAILED:
                    connection.exec_driver_sql(
                        "INSERT INTO tmc_failed (shard, topic_no, subscription_no, message_id, failed_ms, fingerprint)"
                        f" SELECT {shard}, {self.topic.number}, {self.subscription}, {number}, {now} - 30000, '' {some}"
                    )

    def make_due(self) -> int:
        """All that is scheduled, now. Returns: that time, milliseconds by the database's clock."""
        with self.engine.connect() as connection:
            now = int(connection.exec_driver_sql(f"SELECT {self._series.now}").scalar_one())
            for shard in self.shards:
                connection.exec_driver_sql(
                    f"UPDATE tmc_consumption_{shard:02d} SET due_ms = {now}"
                    f" WHERE subscription_no = {self.subscription} AND due_ms > {now}"
                )
        return now

    def clear(self) -> None:
        """Forget the deliveries."""
        with self.engine.connect() as connection:
            for shard in self.shards:
                connection.exec_driver_sql(
                    f"DELETE FROM tmc_consumption_{shard:02d} WHERE subscription_no = {self.subscription}"
                )

    def one(self, what: str, where: str = "TRUE") -> int:
        """A value over all of them. what: an aggregate that can be added up, or MAX."""
        found = []
        with self.engine.connect() as connection:
            for shard in self.shards:
                query = f"SELECT {what} FROM tmc_consumption_{shard:02d} WHERE subscription_no = {self.subscription} AND {where}"
                found.append(int(connection.exec_driver_sql(query).scalar_one() or 0))
        return max(found) if what.startswith("MAX") else sum(found)

    def lateness_ms(self, where: str) -> list[int]:
        """From the end of its delay to the stored ack, of each such row; ascending."""
        late: list[int] = []
        with self.engine.connect() as connection:
            for shard in self.shards:
                query = (
                    f"SELECT closed_ms - since_ms FROM tmc_consumption_{shard:02d}"
                    f" WHERE subscription_no = {self.subscription} AND since_ms IS NOT NULL AND {where.format(shard=shard)}"
                )
                late += [int(each) for each in connection.exec_driver_sql(query).scalars()]
        return sorted(late)

    def close(self) -> None:
        self.engine.dispose()
