"""What needs two operators, and the configuration in effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import tmc_client as tmc
from tests.integration.server.test_api import Api
from tests.support.center import RunningCenter
from tests.support.console import browser
from tmc_common.protocol import admin_pb2, types_pb2
from tmc_server.domain.proposals import VALID_MS
from tmc_server.requests.bulk import BulkFilter, dry_run_id
from tmc_server.store.tables import proposal
from tmc_storm.eventually import eventually

TOPIC = "order.paid"
CLOSED, REQUIRED = ("FAILED_PRECONDITION", "PROPOSAL_CLOSED", ""), ("FAILED_PRECONDITION", "APPROVAL_REQUIRED", "")
COMMIT, ROLLBACK = types_pb2.VERDICT_COMMIT, types_pb2.VERDICT_ROLLBACK


class Setting:
    """Decisions need two operators, and so do bulk jobs of more than two deliveries."""

    def __init__(self, center: RunningCenter, channel: grpc.Channel) -> None:
        self.center, self.api = center, Api(center, channel)
        self.tokens = {
            name: self.register(name, *topics)
            for name, topics in (("ann", ()), ("bob", ()), ("orders-only", ("order.",)), ("pay-only", ("pay.",)))
        }
        self._keys = iter(range(1_000))

    def register(self, name: str, *topics: str) -> str:
        request = admin_pb2.RegisterOperatorRequest(
            name=name, role=admin_pb2.ROLE_OPERATOR, topics=topics, reason="test"
        )
        return str(self.api("AdminService/RegisterOperator", request).token)

    def call(self, name: str, method: str, request: Any) -> Any:
        return self.api(f"AdminService/{method}", request, [("authorization", f"Bearer {self.tokens[name]}")])

    def prepared(self) -> str:
        with tmc.connect(self.center.address, app="orders", key=self.center.keys["orders"]) as orders:
            return orders.prepare(TOPIC, b"x", key=f"k{next(self._keys)}").message_id

    def decide(self, name: str, message_id: str, verdict: int = COMMIT, reason: str = "the bank says so") -> Any:
        request = admin_pb2.DecideMessageRequest(message_id=message_id, verdict=verdict, reason=reason)
        return self.call(name, "DecideMessage", request)

    def pending(self, name: str = "ann") -> list[Any]:
        return list(self.call(name, "ListProposals", admin_pb2.ListProposalsRequest(pending_only=True)).proposals)

    def newest(self) -> int:
        return int(self.pending()[0].proposal)

    def approve(self, name: str, proposal: int) -> Any:
        return self.call(name, "ApproveProposal", admin_pb2.ApproveProposalRequest(proposal=proposal, reason="seen it"))

    def reject(self, name: str, proposal: int) -> Any:
        return self.call(name, "RejectProposal", admin_pb2.RejectProposalRequest(proposal=proposal, reason="no"))

    def state(self, message_id: str) -> str:
        request = admin_pb2.GetMessageDetailRequest(message_id=message_id)
        message = self.api("AdminService/GetMessageDetail", request).message
        return str(types_pb2.MessageState.Name(message.state)).removeprefix("MESSAGE_STATE_")

    def audit(self, **wanted: Any) -> list[Any]:
        return list(self.api("AdminService/ListAudit", admin_pb2.ListAuditRequest(**wanted)).entries)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("four-eyes")
    rules = {"decide": True, "bulk_over": 2}
    with (
        RunningCenter(f"sqlite:///{folder}/tmc.db", approval=rules) as center,
        grpc.insecure_channel(center.address) as channel,
    ):
        yield Setting(center, channel)


def test_a_decision_takes_effect_when_another_operator_approves_it(setting: Setting) -> None:
    message = setting.prepared()
    assert setting.decide("ann", message) == REQUIRED
    assert setting.state(message) == "PREPARED"
    (found,) = setting.pending()
    assert (found.action, found.topic, found.actor, found.reason) == (
        "DecideMessage",
        TOPIC,
        "ann",
        "the bank says so",
    )
    assert found.subject == f"COMMIT message {message}"
    answer = setting.approve("bob", found.proposal)
    assert (answer.proposal.state, answer.proposal.decided_by) == (admin_pb2.PROPOSAL_STATE_APPROVED, "bob")
    assert answer.message.message_id == message
    assert (setting.state(message), setting.pending()) == ("COMMITTED", [])
    number = found.proposal
    rows = [(row.actor, row.action, row.reason) for row in setting.audit()[:5]]
    assert ("ann", "propose", "the bank says so") in rows
    assert ("bob", "approve proposal", "seen it") in rows
    decided = f"proposal {number} of ann, approved by bob: seen it; the bank says so"
    assert ("bob", "decide submit", decided) in rows


def test_nobody_approves_a_proposal_of_their_own(setting: Setting) -> None:
    message = setting.prepared()
    setting.decide("ann", message)
    number = setting.newest()
    assert setting.approve("ann", number) == REQUIRED
    assert setting.decide("ann", message, reason="again") == REQUIRED  # the same proposal
    assert len(setting.pending()) == 1
    assert setting.state(message) == "PREPARED"
    assert setting.reject("ann", number).state == admin_pb2.PROPOSAL_STATE_REJECTED


def test_the_same_call_by_another_operator_is_no_approval_and_names_the_proposal(setting: Setting) -> None:
    message = setting.prepared()
    setting.decide("ann", message)
    number = setting.newest()
    request = admin_pb2.DecideMessageRequest(message_id=message, verdict=COMMIT, reason="me too")
    with grpc.insecure_channel(setting.center.address) as channel, pytest.raises(grpc.RpcError) as refused:
        token = [("authorization", f"Bearer {setting.tokens['bob']}")]
        setting.center.admin(channel).DecideMessage(request, metadata=token, timeout=10)
    assert refused.value.details() == f"ann has proposed the same: approve it with `tmc admin approve {number}`."
    assert setting.state(message) == "PREPARED"
    setting.reject("bob", number)


def test_what_was_rejected_cannot_be_approved(setting: Setting) -> None:
    message = setting.prepared()
    setting.decide("ann", message)
    number = setting.newest()
    setting.reject("bob", number)
    assert setting.approve("bob", number) == CLOSED
    assert setting.reject("bob", number).state == admin_pb2.PROPOSAL_STATE_REJECTED  # repeated
    assert setting.state(message) == "PREPARED"


def test_an_approval_that_is_repeated_does_nothing_twice(setting: Setting) -> None:
    message = setting.prepared()
    setting.decide("ann", message)
    number = setting.newest()
    first, second = setting.approve("bob", number), setting.approve("bob", number)
    assert first.message.message_id == second.message.message_id == message
    assert len([row for row in setting.audit(message_id=message) if row.action == "decide submit"]) == 1
    assert setting.reject("ann", number) == CLOSED


def test_an_approval_of_what_is_no_longer_possible_is_not_stored(setting: Setting) -> None:
    message = setting.prepared()
    setting.decide("ann", message, ROLLBACK)
    number = setting.newest()
    with tmc.connect(setting.center.address, app="orders", key=setting.center.keys["orders"]) as orders:
        orders.submit(message)
    assert setting.approve("bob", number)[1] == "ALREADY_COMMITTED"
    assert setting.newest() == number
    assert "approve proposal" not in {row.action for row in setting.audit(subject=f"proposal {number}")}
    setting.reject("bob", number)


def test_one_message_is_one_proposal_however_its_id_is_written(setting: Setting) -> None:
    message = setting.prepared()
    topic, app, shard, number = message.split("-")
    setting.decide("ann", message)
    assert setting.decide("ann", f"0{topic}-{app}-{shard}-{number}") == REQUIRED
    assert setting.decide("ann", f"{topic}-{app}-{shard}-0{number}") == REQUIRED
    assert setting.decide("ann", f"{topic}-771-{shard}-{number}") == ("NOT_FOUND", "MESSAGE_UNKNOWN", "")
    (only,) = setting.pending()
    setting.reject("ann", only.proposal)


def test_a_long_reason_hides_no_approval(setting: Setting) -> None:
    message = setting.prepared()
    setting.decide("ann", message, reason="x" * 500)
    number = setting.newest()
    setting.approve("bob", number)
    (row,) = [each for each in setting.audit(message_id=message) if each.action == "decide submit"]
    assert row.reason.startswith(f"proposal {number} of ann, approved by bob: seen it; xxx")


def test_a_bad_request_is_refused_and_not_proposed(setting: Setting) -> None:
    message = setting.prepared()
    assert setting.decide("ann", message, verdict=0) == ("INVALID_ARGUMENT", "FIELD_INVALID", "verdict")
    assert setting.decide("ann", message, verdict=77) == ("INVALID_ARGUMENT", "FIELD_INVALID", "verdict")
    assert setting.decide("ann", message, reason="") == ("INVALID_ARGUMENT", "FIELD_INVALID", "reason")
    assert setting.decide("ann", "1-1-05-1")[0] == "NOT_FOUND"
    assert setting.pending() == []


def test_limits_to_topics_hold_for_proposals(setting: Setting) -> None:
    message = setting.prepared()
    assert setting.decide("orders-only", message) == REQUIRED
    (mine,) = setting.pending("orders-only")
    assert setting.pending("pay-only") == []
    unknown = ("NOT_FOUND", "PROPOSAL_UNKNOWN", "")  # as one that does not exist
    assert setting.approve("pay-only", mine.proposal) == unknown
    assert setting.reject("pay-only", mine.proposal) == unknown
    assert setting.approve("ann", 999_999) == unknown
    setting.reject("ann", mine.proposal)


def test_a_proposal_of_someone_who_lost_the_rights_is_void(setting: Setting) -> None:
    setting.tokens["gone"] = setting.register("gone")
    message = setting.prepared()
    setting.decide("gone", message)
    number = setting.newest()
    setting.api("AdminService/RemoveOperator", admin_pb2.RemoveOperatorRequest(name="gone", reason="left"))
    assert setting.approve("bob", number) == CLOSED
    assert setting.state(message) == "PREPARED"
    setting.reject("bob", number)


def test_only_large_bulk_jobs_need_two(setting: Setting) -> None:
    with tmc.connect(setting.center.address, app="orders", key=setting.center.keys["orders"]) as orders:
        for number in range(3):
            orders.publish(TOPIC, b"x", key=f"bulk-{number}")
    wanted = admin_pb2.BulkFilter(
        action=admin_pb2.BULK_ACTION_CANCEL, topic=TOPIC, state=types_pb2.CONSUMPTION_STATE_SCHEDULED
    )

    def dry_run() -> Any:
        return setting.call("ann", "DryRunBulkJob", admin_pb2.DryRunBulkJobRequest(filter=wanted))

    seen = eventually(lambda: found if (found := dry_run()).count >= 3 else None)
    start = admin_pb2.StartBulkJobRequest(filter=wanted, dry_run=seen.dry_run, count=seen.count, reason="stock")
    wrong = admin_pb2.StartBulkJobRequest(filter=wanted, dry_run=seen.dry_run, count=seen.count + 1, reason="stock")
    assert setting.call("ann", "StartBulkJob", wrong)[1] == "FIELD_INVALID"
    as_of = int(seen.dry_run.partition("-")[0])
    forged = dry_run_id(BulkFilter(action=2, topic=TOPIC, state=wanted.state), as_of, 1)
    small = admin_pb2.StartBulkJobRequest(filter=wanted, dry_run=forged, count=1, reason="stock")
    assert setting.call("ann", "StartBulkJob", small) == ("INVALID_ARGUMENT", "FIELD_INVALID", "count")
    assert setting.call("ann", "StartBulkJob", start) == REQUIRED
    assert list(setting.api("AdminService/ListBulkJobs", admin_pb2.ListBulkJobsRequest()).jobs) == []
    (found,) = setting.pending()
    selected = f"CANCEL {seen.count}: SCHEDULED deliveries of {TOPIC} to coupons (default), since "
    assert found.subject.startswith(selected)
    job = setting.approve("bob", found.proposal).job
    assert (job.count, job.actor) == (seen.count, "bob")
    eventually(
        lambda: setting.api("AdminService/GetBulkJob", admin_pb2.GetBulkJobRequest(job=job.job)).done == job.count
    )
    with tmc.connect(setting.center.address, app="orders", key=setting.center.keys["orders"]) as orders:
        orders.publish(TOPIC, b"x", key="small")
    small = eventually(lambda: found if (found := dry_run()).count == 1 else None)
    start = admin_pb2.StartBulkJobRequest(filter=wanted, dry_run=small.dry_run, count=1, reason="stock")
    assert setting.call("ann", "StartBulkJob", start).job > job.job


def test_a_proposal_expires_after_a_day(setting: Setting) -> None:
    message = setting.prepared()
    setting.decide("ann", message)
    (found,) = setting.pending()
    assert found.expires_ms - found.created_ms == VALID_MS
    with setting.center.server.store.shards.catalog.transaction() as connection:
        passed = {"created_ms": proposal.c.created_ms - VALID_MS, "expires_ms": proposal.c.expires_ms - VALID_MS}
        connection.execute(proposal.update().filter_by(id=found.proposal).values(passed))
    assert setting.pending() == []
    assert (setting.approve("bob", found.proposal), setting.reject("bob", found.proposal)) == (CLOSED, CLOSED)
    shown = setting.call("ann", "ListProposals", admin_pb2.ListProposalsRequest()).proposals[0]
    assert shown.state == admin_pb2.PROPOSAL_STATE_EXPIRED
    assert setting.decide("ann", message) == REQUIRED  # another proposal
    assert setting.newest() > found.proposal
    setting.reject("ann", setting.newest())


class TestCommandLine:
    def test_propose_list_approve(self, setting: Setting) -> None:
        message = setting.prepared()
        run = setting.center.run_admin
        ann, bob = ("--token", setting.tokens["ann"]), ("--token", setting.tokens["bob"])
        refused = run(*ann, "decide", message, "COMMIT", "--reason", "paid")
        number = setting.newest()
        assert (refused.returncode, f"tmc admin approve {number}" in refused.stderr) == (1, True)
        listed = json.loads(run(*bob, "list-proposals", "--pending").stdout)
        assert [int(each["proposal"]) for each in listed["proposals"]] == [number]
        approved = json.loads(run(*bob, "approve", str(number), "--reason", "yes").stdout)
        assert approved["message"]["state"] == "MESSAGE_STATE_COMMITTED"
        other = setting.prepared()
        setting.decide("ann", other)
        rejected = json.loads(run(*bob, "reject", str(setting.newest()), "--reason", "no").stdout)
        assert rejected["state"] == "PROPOSAL_STATE_REJECTED"


class TestConsole:
    def test_the_second_operator_approves_on_a_page(self, setting: Setting) -> None:
        message, other = setting.prepared(), setting.prepared()
        with browser(setting.center) as ann, browser(setting.center) as bob:
            ann.log_in(setting.tokens["ann"])
            ann.switch_actions_on()
            refused = ann.post(
                "/do/decide", {"message_id": message, "verdict": "1", "reason": "paid", "next": "/undecided"}
            )
            number = setting.newest()
            assert (refused.status_code, f"proposal {number}" in refused.text, 'href="/proposals"' in refused.text) == (
                409,
                True,
                True,
            )
            own = ann.get("/proposals").text
            assert ("Withdraw" in own, "Approve" in own.replace("Approvals", "")) == (True, False)
            bob.log_in(setting.tokens["bob"])
            assert "/do/approve" not in bob.get("/proposals").text  # actions are off
            bob.switch_actions_on()
            assert f"COMMIT message {message}" in bob.get("/proposals").text
            done = bob.post("/do/approve", {"proposal": str(number), "reason": "yes", "next": "/proposals"})
            assert (done.status_code, "The proposal was approved." in done.text) == (200, True)
            assert setting.state(message) == "COMMITTED"
            setting.decide("ann", other)
            bob.post("/do/reject", {"proposal": str(setting.newest()), "reason": "no", "next": "/proposals"})
            assert setting.pending() == []
            assert "REJECTED" in bob.get("/proposals?all=1").text


class TestConfiguration:
    def test_it_is_what_the_server_runs_with_without_secrets(self, tmp_path: Path) -> None:
        secrets = {"audit": {"seal_keys": ["marked-seal"]}, "alerts": {"webhook": "http://127.0.0.1:1/marked-hook"}}
        with (
            RunningCenter(f"sqlite:///{tmp_path}/c.db", approval={"bulk_over": 7}, **secrets) as center,
            grpc.insecure_channel(center.address) as channel,
        ):
            found = Api(center, channel)("AdminService/GetConfiguration", admin_pb2.GetConfigurationRequest())
            settings = {each.name: each for each in found.settings}
            assert "marked" not in str(found)
            assert str(tmp_path) not in str(found)
            changed = {name for name, each in settings.items() if each.changed}
            assert {"approval.bulk_over", "audit.seal_keys", "alerts.webhook", "store.catalog"} <= changed
            assert settings["approval.bulk_over"].value == "7"
            assert (settings["audit.seal_keys"].secret, settings["audit.seal_keys"].value) == (True, "")
            assert (settings["limits.streams"].value, settings["limits.streams"].changed) == ("200", False)
            shown = json.loads(center.run_admin("get-configuration", "--changed").stdout)
            assert {each["name"] for each in shown["settings"]} == changed
