"""Two real servers: a registration that is answered holds at both, however slowly its change was committed."""

from __future__ import annotations

import threading

import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tests.support.cluster import Cluster
from tmc_common.protocol import admin_pb2
from tmc_storm.eventually import eventually

pytestmark = [pytest.mark.mariadb, pytest.mark.services, pytest.mark.timeout(300)]


def test_a_registration_whose_commit_was_slow_misses_no_message_through_the_other_server() -> None:
    with Cluster(servers=2) as cluster:
        cluster.register("orders", "coupons", "late")
        cluster.subscribe("order.paid", "coupons")
        made: list[admin_pb2.Subscription] = []
        request = admin_pb2.RegisterSubscriptionRequest(topic="order.paid", app="late")
        registering = threading.Thread(target=lambda: made.append(cluster.admin("RegisterSubscription", request)))
        engine = sa.create_engine(cluster.databases[0].url("tmc_cluster"), isolation_level="AUTOCOMMIT")
        with engine.connect() as backup:
            for stage in ("START", "FLUSH", "BLOCK_DDL", "BLOCK_COMMIT"):
                backup.exec_driver_sql(f"BACKUP STAGE {stage}")
            registering.start()
            waiting = sa.text(
                "SELECT COUNT(*) FROM information_schema.processlist WHERE state LIKE 'Waiting for backup%'"
            )
            eventually(lambda: backup.execute(waiting).scalar_one() > 0)
            # Longer than a copy may be old: both servers have looked again meanwhile, and seen nothing.
            threading.Event().wait(2 * 1.5)
            assert not made
            backup.exec_driver_sql("BACKUP STAGE END")
        engine.dispose()
        registering.join(60)
        (late,) = made
        assert late.effective_ms > 0
        numbers = []
        for server in cluster.servers:
            with tmc.connect(server.address, app="orders", key=cluster.keys["orders"]) as sender:
                numbers += [sender.publish("order.paid", {"n": n}, key=f"{server.port}-{n}") for n in range(50)]
        assert sum(cluster.consumptions(late.number).values()) == len(numbers) == 100
        eventually(lambda: len({server.catalog_version for server in cluster.live_servers()}) == 1)
