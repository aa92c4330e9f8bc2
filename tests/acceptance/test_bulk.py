"""A bulk job over real processes: servers are killed in the middle of it, and each failure is reactivated once."""

from __future__ import annotations

from collections import Counter

import tmc_client as tmc
from tests.support.cluster import Cluster
from tests.support.rows import Rows
from tmc_common.protocol import admin_pb2
from tmc_server.domain.consumption import ConsumptionState
from tmc_storm.eventually import eventually

DELIVERIES = 2_000
FAILED = ConsumptionState.FAILED


def test_each_failure_gets_one_new_episode_although_servers_are_killed_three_times() -> None:
    with Cluster(servers=2, lease_seconds=2) as cluster:
        cluster.register("orders", "coupons")
        made = cluster.subscribe("bulk.failed", "coupons", topic_settings={"spread": 8})
        cluster.in_effect(made)
        rows = Rows(cluster, "bulk.failed", made)
        rows.fill(DELIVERIES, FAILED, "NULL")
        with tmc.connect(cluster.addresses, app="coupons", key=cluster.keys["coupons"]) as coupons:
            consumer = tmc.Consumer(coupons)

            @consumer.listener("bulk.failed")
            def fail(body: bytes) -> None:
                raise tmc.Reject("it fails again at once, so that a second reactivation would show")

            with consumer:
                number = _start(cluster)
                for part in (1, 2, 3):
                    eventually(lambda part=part: _job(cluster, number).done >= part * DELIVERIES // 5)
                    victim = cluster.servers[part % 2]
                    victim.kill()
                    victim.start()
                done = eventually(lambda: _ended(cluster, number))
                eventually(lambda: rows.one("COUNT(*)", f"state = {int(FAILED)} AND attempt > 1") == DELIVERIES)
        assert (done.count, done.done, done.unchanged, done.refused) == (DELIVERIES, DELIVERIES, 0, 0)
        with rows.engine.connect() as connection:  # an alert for each episode; those from before have none
            alerted = "SELECT message_id, COUNT(*) FROM tmc_alert WHERE kind = 'delivery failed' GROUP BY message_id"
            episodes = dict(connection.exec_driver_sql(alerted).all())
        assert len(episodes) == DELIVERIES
        assert set(episodes.values()) == {1}
        items, token = Counter[str](), ""
        while True:
            request = admin_pb2.ListBulkItemsRequest(job=number, page_size=1_000, page_token=token)
            page = cluster.admin("ListBulkItems", request)
            items.update(item.message_id for item in page.items)
            token = page.next_page_token
            if not token:
                break
        assert len(items) == DELIVERIES
        assert set(items.values()) == {1}
        rows.close()


def _start(cluster: Cluster) -> int:
    wanted = admin_pb2.BulkFilter(action=admin_pb2.BULK_ACTION_REACTIVATE, topic="bulk.failed", app="coupons")
    seen = cluster.admin("DryRunBulkJob", admin_pb2.DryRunBulkJobRequest(filter=wanted))
    start = admin_pb2.StartBulkJobRequest(
        filter=wanted, dry_run=seen.dry_run, count=seen.count, reason="the handler is mended", rate=200, hold_ms=0
    )
    number: int = cluster.admin("StartBulkJob", start).job
    return number


def _job(cluster: Cluster, number: int) -> admin_pb2.BulkJob:
    found: admin_pb2.BulkJob = cluster.admin("GetBulkJob", admin_pb2.GetBulkJobRequest(job=number))
    return found


def _ended(cluster: Cluster, number: int) -> admin_pb2.BulkJob | None:
    found = _job(cluster, number)
    return found if found.finished_ms else None
