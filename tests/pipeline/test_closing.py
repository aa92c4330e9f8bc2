"""People act on deliveries and discrepancies: they cancel, repair by a replay, clean, and accept for a while."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.kinds import KINDS, Planted
from tests.pipeline.running import Jobs, few_sources
from tests.support.filled import FilledCenter
from tmc_common.headers import REPLAY_OF, REPLAY_TO
from tmc_pipeline.errors import CannotRun
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.reconcile.accepted import Acceptances
from tmc_pipeline.reconcile.job import Summary
from tmc_pipeline.reconcile.verdicts import ACCEPTED, AGREED, CANCELED, DISCREPANCIES

pytestmark = [pytest.mark.mariadb, pytest.mark.timeout(600)]
Fill = Callable[..., FilledCenter]
SHARD = 16
_DAY_MS = 86_400_000


@pytest.fixture
def jobs(spark: SparkSession, filled: Fill, folder: Path) -> Jobs:
    center = filled(24, (SHARD,))
    center.fill_ledgers()
    return few_sources(spark, center, folder, producers=("p1",), consumers=("c1", "c2", "c3", "c4"))


def _messages(jobs: Jobs, topic: int) -> list[Planted]:
    rows = jobs.center.rows(
        f"SELECT id, message_key FROM tmc_message_{{nn}} WHERE topic_no = {topic} ORDER BY id", [SHARD]
    )
    return [
        Planted(center=jobs.center, shard=SHARD, number=int(row.id), topic=topic, key=str(row.message_key))
        for row in rows
    ]


def _found(jobs: Jobs, summary: Summary) -> dict[tuple[str, str], str]:
    return {
        (row.message_id, row.subscriber): row.verdict for row in jobs.details(summary) if row.verdict in DISCREPANCIES
    }


def _acceptances(jobs: Jobs) -> Acceptances:
    return Acceptances(jobs.spark, HadoopFolder(jobs.spark, jobs.settings.reconcile.path))


def _cancel(message: Planted, at_ms: int) -> None:
    message.deliveries(f"state = 4, closed_ms = {at_ms}", first=True)
    message.forget_inboxes(first=True)


class TestCanceled:
    @pytest.mark.takes_turns("closing")
    def test_what_the_audit_trail_names_is_no_discrepancy_and_is_listed(self, jobs: Jobs) -> None:
        """One by one, by a bulk job whose outcomes are known, and by one whose outcomes are forgotten."""
        single, bulk, forgotten, forged, late = _messages(jobs, 1)[:5]
        at = jobs.center.start_ms + 3_600_000
        for place, message in enumerate((single, bulk, forgotten)):
            _cancel(message, at + place)
        _cancel(forged, at - 40_000)  # before any job worked, and
        _cancel(late, at + 50_000)  # long after that
        subscription = single.subscriptions[0][0]
        run = jobs.center.change
        subject = f"message {single.number} subscription {subscription}"
        record = f"{at}, 'ops', 'cancel consumption', '{subject}', 'old'"
        run(SHARD, f"INSERT INTO tmc_audit (at_ms, actor, action, subject, reason) VALUES ({record})")
        places = json.dumps([[SHARD, 1, subscription]])
        for job in (1, 2):
            selection = f'{{"places": {places}}}'
            with jobs.center.sql() as catalog:
                catalog.exec_driver_sql(
                    "INSERT INTO tmc_bulk_job (id, dry_run, action, selection, agreed, rate, actor, reason, created_ms, start_ms)"
                    f" VALUES ({job}, 'dry{job}', 2, '{selection}', 1, 1, 'ops', 'old', 0, {at + job})"
                )
        item = f"1, {SHARD}, {bulk.number}, {subscription}, 1, '', {at + 1}"
        run(SHARD, f"INSERT INTO tmc_bulk_item VALUES ({item})")
        run(SHARD, f"INSERT INTO tmc_bulk_progress VALUES (1, {SHARD}, 0, 0, 1, 0, 0, 1, {at + 1})")
        run(SHARD, f"INSERT INTO tmc_bulk_progress VALUES (2, {SHARD}, 0, 0, 1, 0, 0, 2, {at + 2})")
        summary = jobs.run_reconcile()
        subscriber = f"{single.subscriptions[0][1]}.default"
        assert _found(jobs, summary) == {(message.id, subscriber): "state differs" for message in (forged, late)}
        assert (summary.verdicts[CANCELED], summary.verdicts[AGREED]) == (3, 19)
        assert all(each["holds"] for each in summary.relations)
        again = jobs.run_reconcile(since="last")
        assert _found(jobs, again) == _found(jobs, summary)
        assert again.span["left"] == 2, "what was canceled is settled"


class TestRepaired:
    @pytest.mark.parametrize("to_one", [True, False])
    def test_a_replay_with_its_effect_clears_what_was_lost(self, jobs: Jobs, to_one: bool) -> None:
        lost, other, *_, again, failed = _messages(jobs, 1)
        for message in (lost, other):
            KINDS["acked without effect, one"].plant(message)
        number, consumer = lost.subscriptions[0]
        subscriber = f"{consumer}.default"
        body = f"(SELECT body FROM (SELECT body FROM tmc_message_{SHARD} WHERE id = {{}}) b)"
        for replay, original in ((again, lost), (failed, other)):
            replay.forget_ledger()
            headers = {REPLAY_OF: original.id} | ({REPLAY_TO: str(number)} if to_one else {})
            key = f"replay.{original.id}" + (f".{number}.7" if to_one else "")
            hashed = "".join(f", CHAR(0), '{len(k)}:{k}{len(v)}:{v}'" for k, v in sorted(headers.items()))
            content = body.format(original.number)
            replay.message(f"headers = '{json.dumps(headers)}', message_key = '{key}', body = {content}")
            replay.message(f"digest = UNHEX(SHA2(CONCAT('0:', LENGTH(body), ':', body, content_type{hashed}), 256))")
            if to_one:
                kept = replay.subscriptions[0][0]
                replay.center.change(
                    SHARD,
                    f"DELETE FROM tmc_consumption_{{nn}} WHERE message_id = {replay.number} AND subscription_no <> {kept}",
                )
                other_inbox = replay.subscriptions[1][1]
                with replay.center.sql(replay.center.ledger(other_inbox)) as run:
                    run.exec_driver_sql(f"DELETE FROM tmc_inbox WHERE message_id = '{replay.id}'")
        failed.forget_inboxes(first=True)  # acked, and again nothing came of it
        summary = jobs.run_reconcile()
        assert set(_found(jobs, summary)) == {(other.id, subscriber), (failed.id, subscriber)}

    @pytest.mark.takes_turns("closing")
    def test_without_other_losses_the_books_agree(self, jobs: Jobs) -> None:
        """Found by one run, repaired, and cleared by the next one."""
        lost, *_, again = _messages(jobs, 1)
        KINDS["acked without effect, everybody"].plant(lost)
        assert jobs.run_reconcile(until_ms=jobs.center.start_ms + 20_000).discrepancies == 1
        again.forget_ledger()
        body = f"(SELECT body FROM (SELECT body FROM tmc_message_{SHARD} WHERE id = {lost.number}) b)"
        again.message(
            f"""headers = '{{"{REPLAY_OF}": "{lost.id}"}}', message_key = 'replay.{lost.id}', body = {body}"""
        )
        hashed = f"CHAR(0), '{len(REPLAY_OF)}:{REPLAY_OF}{len(lost.id)}:{lost.id}'"
        again.message(f"digest = UNHEX(SHA2(CONCAT('0:', LENGTH(body), ':', body, content_type, {hashed}), 256))")
        summary = jobs.run_reconcile(since="last")
        assert _found(jobs, summary) == {}
        assert summary.consistent


class TestAccepted:
    @pytest.mark.takes_turns("closing")
    def test_what_people_closed_is_counted_apart_until_it_expires(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lost, ghost, body = _messages(jobs, 1)[:3]
        KINDS["acked without effect, everybody"].plant(lost)
        KINDS["no transaction behind it"].plant(ghost)
        KINDS["another body"].plant(body)
        assert len(_found(jobs, jobs.run_reconcile())) == 4
        now = jobs.tables.now_ms()
        acceptances = _acceptances(jobs)
        _, made = acceptances.accept([lost.id, ghost.id], "", "paid by hand", 90, now)
        assert sorted((each.message_id, each.verdict) for each in made) == [
            (lost.id, "lost"),
            (lost.id, "lost"),
            (ghost.id, "ghost"),
        ]
        summary = jobs.run_reconcile(since="last")
        assert set(_found(jobs, summary)) == {(body.id, "")}
        assert summary.verdicts[ACCEPTED] == 2
        assert all("paid by hand" in row.reason for row in jobs.details(summary) if row.verdict == ACCEPTED)
        acceptances.accept([], "body differs", "seen", 90, now)
        # Something else about the same message is reported.
        KINDS["committed here, rolled back there"].plant(body)
        acceptances.withdraw([ghost.id], "a mistake", now + 1)
        assert _found(jobs, jobs.run_reconcile()) == {(body.id, ""): "state differs", (ghost.id, ""): "ghost"}
        assert len(acceptances.valid(now + 91 * _DAY_MS)) == 0
        assert {each.message_id for each in acceptances.valid(now + 2)} == {lost.id, body.id}

    def test_only_what_a_run_reports_can_be_accepted(self, jobs: Jobs) -> None:
        acceptances = _acceptances(jobs)
        with pytest.raises(CannotRun, match="no reconciliation yet"):
            acceptances.accept(["1-1-16-5"], "", "why", 90, 1)
        jobs.run_reconcile()
        with pytest.raises(CannotRun, match="reports no 1-1-16-5: nothing was accepted"):
            acceptances.accept(["1-1-16-5"], "", "why", 90, 1)
        with pytest.raises(CannotRun, match="There is no verdict 'gone': they are unknown state"):
            acceptances.accept([], "gone", "why", 90, 1)
        with pytest.raises(CannotRun, match="Nothing about 1-1-16-5 is accepted"):
            acceptances.withdraw(["1-1-16-5"], "why", 1)


class TestCleaned:
    @pytest.mark.takes_turns("closing")
    def test_effects_before_the_horizon_of_an_inbox_are_nobody_s_loss(self, jobs: Jobs) -> None:
        """Cleaned as documented: how far it went is recorded; what is missing after that is a loss."""
        messages = _messages(jobs, 3)
        horizon = jobs.center.start_ms + 3 * 3_600_000
        with jobs.center.sql(jobs.center.ledger("c3")) as run:
            run.exec_driver_sql(f"INSERT INTO tmc_inbox_horizon VALUES ('c3.default', {horizon})")
        for message in messages:
            message.forget_inboxes()
        assert _found(jobs, jobs.run_reconcile()) == {}
        with jobs.center.sql(jobs.center.ledger("c3")) as run:
            run.exec_driver_sql(f"UPDATE tmc_inbox_horizon SET horizon_ms = {jobs.center.start_ms - 86_400_000}")
        assert len(_found(jobs, jobs.run_reconcile())) == len(messages)

    @pytest.mark.takes_turns("closing")
    def test_cleaning_is_no_news_and_what_else_is_missing_is(self, jobs: Jobs) -> None:
        kept, missing = _messages(jobs, 3), _messages(jobs, 2)[0]
        assert jobs.run_reconcile().consistent
        horizon = jobs.center.start_ms + 2 * _DAY_MS
        with jobs.center.sql(jobs.center.ledger("c3")) as run:
            run.exec_driver_sql(f"INSERT INTO tmc_inbox_horizon VALUES ('c3.default', {horizon})")
        for message in kept[:4]:
            message.forget_inboxes()
        summary = jobs.run_reconcile(since="last")
        assert _found(jobs, summary) == {}
        assert summary.verdicts[AGREED] == 0, "nothing was compared again"
        missing.forget_inboxes(first=True)
        assert set(_found(jobs, jobs.run_reconcile(since="last"))) == {(missing.id, "c2.default")}

    def test_a_consumer_three_hours_behind_is_not_accused(
        self, spark: SparkSession, filled: Fill, folder: Path
    ) -> None:
        center = filled(150, (SHARD,))
        center.fill_ledgers()
        jobs = few_sources(spark, center, folder, producers=("p3",), consumers=("c3",))
        with center.sql(center.ledger("c3")) as run:
            run.exec_driver_sql("UPDATE tmc_inbox SET received_ms = received_ms - 10800000")
        assert jobs.run_reconcile(until_ms=center.start_ms + 75_000).consistent
        summary = jobs.run_reconcile(since="last")
        assert _found(jobs, summary) == {}
        (behind,) = [each["clock_behind_ms"] for each in summary.sources if each["app"] == "c3"]
        assert 3 * 3_600_000 - 60_000 < behind <= 3 * 3_600_000
