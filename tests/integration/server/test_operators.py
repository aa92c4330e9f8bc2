"""Who may do what: every RPC with every role, on topics of one's own and of others; tokens, bodies, and what is audited."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory

import tmc_client as tmc
from tests.integration.server.test_api import Api
from tests.support.center import RunningCenter
from tmc_common.protocol import admin_pb2, message_pb2, types_pb2
from tmc_server.domain.proposals import NewProposal, ProposalAction
from tmc_server.requests.overviewing import Overviewing
from tmc_server.store.proposals import SqlProposals
from tmc_storm.eventually import eventually

OURS, THEIRS = "order.paid", "pay.done"
ROLES = ("viewer", "operator", "admin")
SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
PAGE = (Path(__file__).parents[3] / "docs" / "operators.md").read_text()
RIGHTS = {name: (role, limits) for name, role, limits in re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", PAGE, re.M)}
DENIED = "PERMISSION_DENIED"


class Setting:
    """A center with topics of two teams, a message in each, and a token for every role, with and without limits."""

    def __init__(self, center: RunningCenter, channel: grpc.Channel) -> None:
        self.center, self.channel = center, channel
        self.api = Api(center, channel)
        center.subscribe(THEIRS, "coupons")
        with tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders:
            self.messages = {topic: orders.publish(topic, b"secret", key="k") for topic in (OURS, THEIRS)}
        self.tokens = {
            (role, is_limited): self.register(f"{role}.{is_limited}", role, *(["order."] if is_limited else []))
            for role in ROLES
            for is_limited in (False, True)
        }
        self.jobs = {topic: self._job(topic) for topic in (OURS, THEIRS)}
        self.proposals = {topic: self._proposal(topic) for topic in (OURS, THEIRS)}

    def register(self, name: str, role: str, *topics: str, **more: Any) -> str:
        number = admin_pb2.Role.Value(f"ROLE_{role.upper()}")
        request = admin_pb2.RegisterOperatorRequest(name=name, role=number, topics=topics, reason="test", **more)
        return str(self.api("AdminService/RegisterOperator", request).token)

    def _job(self, topic: str) -> int:
        wanted = admin_pb2.BulkFilter(action=admin_pb2.BULK_ACTION_CANCEL, topic=topic, state=2)
        wanted.state = types_pb2.CONSUMPTION_STATE_SCHEDULED
        eventually(lambda: self._dry_run(wanted).count)
        seen = self._dry_run(wanted)
        start = admin_pb2.StartBulkJobRequest(
            filter=wanted, dry_run=seen.dry_run, count=seen.count, reason="test", hold_ms=86_400_000
        )
        return int(self.api("AdminService/StartBulkJob", start).job)

    def _proposal(self, topic: str) -> int:
        """Of someone who is no operator any more: it cannot be approved."""
        new = NewProposal(
            action=ProposalAction.DECIDE,
            topic=topic,
            subject="COMMIT",
            request=b"",
            digest=topic.encode().ljust(32),
            actor="gone",
            reason="test",
        )
        return SqlProposals(self.center.server.store.shards.catalog).propose(new).number

    def _dry_run(self, wanted: admin_pb2.BulkFilter) -> Any:
        return self.api("AdminService/DryRunBulkJob", admin_pb2.DryRunBulkJobRequest(filter=wanted))

    def call(self, method: str, request: Any, token: str) -> Any:
        return self.api(f"AdminService/{method}", request, [("authorization", f"Bearer {token}")])

    def audit(self, **wanted: Any) -> list[Any]:
        return list(self.api("AdminService/ListAudit", admin_pb2.ListAuditRequest(**wanted)).entries)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder: Path = tmp_path_factory.mktemp("operators")
    with RunningCenter(f"sqlite:///{folder}/tmc.db") as center, grpc.insecure_channel(center.address) as channel:
        yield Setting(center, channel)


def _about(method: str, topic: str, setting: Setting) -> Any:
    """A request that concerns this topic, and does no harm."""
    descriptor = SERVICE.methods_by_name[method].input_type
    request: Any = message_factory.GetMessageClass(descriptor)()
    fields = descriptor.fields_by_name
    if method in ("RegisterTopic", "UpdateTopic", "PauseTopic", "ResumeTopic"):
        request.name = topic
    elif "topic" in fields:
        request.topic = topic
    if "message_id" in fields and method != "ListAudit":
        request.message_id = setting.messages[topic]
        if "key" in fields:
            request.ClearField("topic")
    if "filter" in fields:
        request.filter.topic = topic
    if "job" in fields:
        request.job = setting.jobs[topic]
    if "proposal" in fields:
        request.proposal = setting.proposals[topic]
    return request


def _unknown(limits: str) -> str:
    """How a job or a proposal about topics of others looks: as one that does not exist. "": the RPC names none."""
    reasons = {"job": "BULK_JOB_UNKNOWN", "proposal": "PROPOSAL_UNKNOWN"}
    return next((reason for word, reason in reasons.items() if word in limits), "")


def test_the_page_lists_every_rpc() -> None:
    assert set(RIGHTS) == {method.name for method in SERVICE.methods}


@pytest.mark.parametrize("method", sorted(RIGHTS))
def test_every_rpc_asks_for_its_role_and_topic(setting: Setting, method: str) -> None:
    needed, limits = RIGHTS[method]
    for role in ROLES:
        for is_limited in (False, True):
            for topic in (OURS, THEIRS):
                answer = setting.call(method, _about(method, topic, setting), setting.tokens[role, is_limited])
                if ROLES.index(role) < ROLES.index(needed):
                    assert answer == (DENIED, "ROLE_REQUIRED", ""), (role, is_limited, topic)
                elif is_limited and topic == THEIRS and (unknown := _unknown(limits)):
                    assert answer == ("NOT_FOUND", unknown, ""), role
                elif is_limited and ("only for" in limits or ("must be" in limits and topic == THEIRS)):
                    assert answer == (DENIED, "TOPIC_NOT_ALLOWED", ""), (role, topic)
                else:
                    assert not isinstance(answer, tuple) or answer[0] != DENIED, (role, is_limited, topic, answer)
                if is_limited and "the answer contains" in limits and not isinstance(answer, tuple):
                    assert THEIRS not in str(answer)


@pytest.mark.parametrize("method", sorted(name for name, (_, limits) in RIGHTS.items() if "must be" in limits))
def test_with_limits_a_topic_is_named(setting: Setting, method: str) -> None:
    request = message_factory.GetMessageClass(SERVICE.methods_by_name[method].input_type)()
    answer = setting.call(method, request, setting.tokens["admin", True])
    unknown = _unknown(RIGHTS[method][1])
    assert answer == (("NOT_FOUND", unknown, "") if unknown else (DENIED, "TOPIC_NOT_ALLOWED", ""))


def test_what_one_operator_looks_at_takes_no_thread_of_others(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three looks at once; further ones wait, and are answered."""
    under_way, most = 0, 0

    async def overview(_self: Overviewing) -> tuple[int, tuple[()]]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.05)
        under_way -= 1
        return 0, ()

    monkeypatch.setattr(Overviewing, "overview", overview)

    def look(role: str) -> Any:
        return setting.call("GetOverview", admin_pb2.GetOverviewRequest(), setting.tokens[role, False])

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(look, ["viewer"] * 20))
        assert (most, any(isinstance(answer, tuple) for answer in answers)) == (3, False)
        list(pool.map(look, ["viewer", "operator"] * 10))
        assert 3 < most <= 6


def test_an_id_that_claims_another_topic_finds_nothing(setting: Setting) -> None:
    own, other = (setting.messages[topic].split("-") for topic in (OURS, THEIRS))
    forged = "-".join([own[0], *other[1:]])
    for method, request in (
        ("GetMessageDetail", admin_pb2.GetMessageDetailRequest(message_id=forged)),
        ("ExplainMessage", admin_pb2.ExplainMessageRequest(message_id=forged)),
        ("GetTimeline", admin_pb2.GetTimelineRequest(message_id=forged)),
        ("CheckNow", admin_pb2.CheckNowRequest(message_id=forged)),
        ("DecideMessage", admin_pb2.DecideMessageRequest(message_id=forged, verdict=2, reason="x")),
    ):
        answer = setting.call(method, request, setting.tokens["admin", True])
        assert answer == ("NOT_FOUND", "MESSAGE_UNKNOWN", ""), method
    for method, request_class in (
        ("ReactivateConsumption", admin_pb2.ReactivateConsumptionRequest),
        ("CancelConsumption", admin_pb2.CancelConsumptionRequest),
        ("ReplayDelivery", admin_pb2.ReplayDeliveryRequest),
    ):
        request = request_class(message_id=forged, app="coupons", reason="x")
        assert setting.call(method, request, setting.tokens["admin", True])[0] == "NOT_FOUND", method
    assert setting.center.detail(THEIRS, "k").consumptions[0].state == types_pb2.CONSUMPTION_STATE_SCHEDULED


def test_no_other_answer_carries_a_body(setting: Setting) -> None:
    with tmc.connect(setting.center.address, app="orders", key=setting.center.keys["orders"]) as orders:
        open_id = orders.prepare(OURS, b"secret", key="decided").message_id
    verdict = admin_pb2.DecideMessageRequest(message_id=open_id, verdict=1, reason="x")
    answers = [
        setting.call("DecideMessage", verdict, setting.tokens["operator", False]),
        setting.call("SearchMessages", admin_pb2.SearchMessagesRequest(text="k"), setting.tokens["operator", False]),
        setting.call(
            "SearchMessages", admin_pb2.SearchMessagesRequest(text=open_id), setting.tokens["operator", False]
        ),
        setting.call("ListMessages", admin_pb2.ListMessagesRequest(), setting.tokens["operator", False]),
    ]
    assert not any(isinstance(answer, tuple) or b"secret" in answer.SerializeToString() for answer in answers)


def test_names_of_other_topics_stay_unknown(setting: Setting) -> None:
    limited = [("authorization", f"Bearer {setting.tokens['admin', True]}")]
    stub = setting.center.admin(setting.channel)
    other = setting.messages[THEIRS]
    for method, request in (
        ("GetMessageDetail", admin_pb2.GetMessageDetailRequest(message_id=other)),
        ("GetBulkJob", admin_pb2.GetBulkJobRequest(job=setting.jobs[THEIRS])),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            getattr(stub, method)(request, metadata=limited)
        assert THEIRS not in str(refused.value.details())
    asked = admin_pb2.ListSubscriptionsRequest(topic=THEIRS)
    assert setting.call("ListSubscriptions", asked, setting.tokens["admin", True])[1] == "TOPIC_UNKNOWN"


def test_a_forward_leads_beyond_the_topics_of_an_administrator(setting: Setting) -> None:
    request = admin_pb2.RegisterSubscriptionRequest(topic=OURS, app="stranger")
    request.forward.kind, request.forward.target = "rabbitmq", "elsewhere"
    assert setting.call("RegisterSubscription", request, setting.tokens["admin", True]) == (
        DENIED,
        "TOPIC_NOT_ALLOWED",
        "",
    )


@pytest.mark.parametrize("name", ["", "center", "developer", "first use", "admin ", "a\u200bnn", "x" * 65])
def test_names_that_would_mislead_are_refused(setting: Setting, name: str) -> None:
    request = admin_pb2.RegisterOperatorRequest(name=name, role=1, reason="x")
    assert setting.api("AdminService/RegisterOperator", request) == ("INVALID_ARGUMENT", "FIELD_INVALID", "name")


def test_search_finds_nothing_of_other_topics(setting: Setting) -> None:
    def found(**wanted: Any) -> list[str]:
        request = admin_pb2.SearchMessagesRequest(**wanted)
        answer = setting.call("SearchMessages", request, setting.tokens["viewer", True])
        return [message.topic for message in answer.messages]

    assert found(text="k") == [OURS]
    assert found(text=setting.messages[THEIRS]) == []
    request = admin_pb2.SearchMessagesRequest(text="k*", topic=THEIRS)
    assert setting.call("SearchMessages", request, setting.tokens["viewer", True])[1] == "TOPIC_UNKNOWN"


def test_a_body_is_for_those_who_may_read_bodies_and_is_audited(setting: Setting) -> None:
    message = setting.messages[OURS]
    request = admin_pb2.GetMessageDetailRequest(message_id=message)
    withheld = setting.call("GetMessageDetail", request, setting.tokens["admin", False])
    assert (withheld.message.body, withheld.body_withheld, withheld.message.key) == (b"", True, "k")
    reader = setting.register("reader", "viewer", reads_bodies=True)
    seen = setting.call("GetMessageDetail", request, reader)
    assert (seen.message.body, seen.body_withheld) == (b"secret", False)
    left_out = setting.call(
        "GetMessageDetail", admin_pb2.GetMessageDetailRequest(message_id=message, without_body=True), reader
    )
    assert (left_out.message.body, left_out.body_withheld) == (b"", False)
    (row,) = setting.audit(actor="reader")
    assert (row.action, row.subject) == ("read body", f"message {message.split('-')[3]}")
    assert row.origin.startswith("ipv4:127.0.0.1:")


def test_a_token_that_expires_is_refused(setting: Setting) -> None:
    short = setting.register("short", "viewer", valid_ms=1_500)
    assert setting.call("WhoAmI", b"", short).name == "short"
    eventually(lambda: setting.call("WhoAmI", b"", short) == ("UNAUTHENTICATED", "ADMIN_ONLY", ""))


def test_tokens_are_rotated_by_their_operator_and_for_others_by_an_administrator(setting: Setting) -> None:
    first = setting.register("ann", "viewer", valid_ms=3_600_000)
    own = admin_pb2.RotateOperatorTokenRequest(reason="monthly", valid_ms=3_600_000, overlap_ms=60_000)
    second = setting.call("RotateOperatorToken", own, first).token
    assert [setting.call("WhoAmI", b"", token).name for token in (first, second)] == ["ann", "ann"]
    # Who found the replaced one neither outlives it nor pushes the owner's out.
    assert setting.call("RotateOperatorToken", own, first) == (DENIED, "ROLE_REQUIRED", "")
    assert setting.call("WhoAmI", b"", second).name == "ann"
    ends = setting.call("WhoAmI", b"", first).expires_ms
    for longer in (0, 93 * 86_400_000):  # a token does not prolong itself
        own.valid_ms = longer
        made = setting.call("RotateOperatorToken", own, second)
        assert abs(made.operator.expires_ms - ends) < 5_000
        second = made.token
    other = admin_pb2.RotateOperatorTokenRequest(name="ann", reason="leaked")
    for role, is_limited in (("operator", False), ("admin", True)):
        answer = setting.call("RotateOperatorToken", other, setting.tokens[role, is_limited])
        assert answer == (DENIED, "ROLE_REQUIRED", "")
    third = setting.call("RotateOperatorToken", other, setting.tokens["admin", False]).token
    refused = ("UNAUTHENTICATED", "ADMIN_ONLY", "")
    assert [setting.call("WhoAmI", b"", token) for token in (first, second)] == [refused, refused]
    assert setting.call("WhoAmI", b"", third).expires_ms == 0


def test_an_administrator_of_some_topics_reaches_no_other_app(setting: Setting) -> None:
    """By a topic of a foreign owner whose checks go to an address of his own, he would get that app's check token."""
    limited = setting.tokens["admin", True]
    denied = (DENIED, "TOPIC_NOT_ALLOWED", "")
    topic = admin_pb2.RegisterTopicRequest(name="order.another", owner="coupons")
    assert setting.call("RegisterTopic", topic, limited) == denied
    topic.owner = "orders"
    assert setting.call("RegisterTopic", topic, limited).owner == "orders"
    target = admin_pb2.CheckTarget(kind="http", address="127.0.0.1:9", options={"path": "/x"})
    check = admin_pb2.SetTopicCheckRequest(topic=OURS, targets=[target], untried=True)
    assert setting.call("SetTopicCheck", check, limited) == denied
    tried = admin_pb2.TryCheckRequest(message_id=setting.messages[OURS], target=target)
    assert setting.call("TryCheck", tried, limited) == denied


def test_what_changed_and_from_where_is_audited(setting: Setting) -> None:
    setting.api("AdminService/UpdateTopic", admin_pb2.UpdateTopicRequest(name=OURS, open_limit=99_999))
    row = setting.audit(action="update topic")[0]
    assert (row.subject, row.change) == (OURS, "open_limit: 100000 -> 99999")
    assert row.origin.startswith("ipv4:127.0.0.1:")
    policy = types_pb2.RetryPolicy(interval_ms=2_000, max_retry=3)
    subscribe = admin_pb2.RegisterSubscriptionRequest(topic=OURS, app="coupons", retry=policy)
    setting.api("AdminService/RegisterSubscription", subscribe)
    assert setting.audit(action="register subscription")[0].change.startswith("interval_ms: 1000 -> 2000")
    reader = setting.register("changed", "viewer", "order.")
    assert (
        setting.audit(action="register operator")[0].change
        == 'role: 1\ntopics: ["order."]\nreads_bodies: 0\nidentities: []'
    )
    update = admin_pb2.UpdateOperatorRequest(name="changed", role=2, reason="on call")
    update.update_mask.paths.append("role")
    setting.api("AdminService/UpdateOperator", update)
    assert setting.audit(action="update operator")[0].change == "role: 1 -> 2"
    assert setting.call("WhoAmI", b"", reader).role == admin_pb2.ROLE_OPERATOR


def test_an_act_on_a_delivery_says_from_where(setting: Setting) -> None:
    message = setting.api(
        "MessageService/Publish",
        message_pb2.PublishRequest(topic=OURS, key="cancelled", body=b"", attempt_id=b"x" * 16),
        setting.center.as_app("orders"),
    ).message_id
    cancel = admin_pb2.CancelConsumptionRequest(message_id=message, app="coupons", reason="ordered by mistake")
    setting.call("CancelConsumption", cancel, setting.tokens["operator", True])
    (row,) = setting.audit(message_id=message)
    assert (row.actor, row.action) == ("operator.True", "cancel consumption")
    assert row.origin.startswith("ipv4:127.0.0.1:")


def test_failed_logins_are_audited_without_their_keys(setting: Setting) -> None:
    for _ in range(3):
        setting.call("WhoAmI", b"", "a wrong token")
    logins = next(duty for duty in setting.center.server.parts.duties if duty.name == "logins")
    logins.wake()
    eventually(lambda: setting.audit(action="failed logins"))
    rows = {row.subject: row for row in setting.audit(action="failed logins")}
    row = rows["credentials admin"]
    assert re.fullmatch(r"\d+ in a minute; the last one as app '' from ipv4:127\.0\.0\.1:\d+", row.reason)
    assert "wrong" not in str(rows)


def test_only_an_operator_of_the_topic_sends_a_replay(setting: Setting) -> None:
    ours = setting.center.as_app("orders")
    replay = message_pb2.PublishRequest(topic=THEIRS, key="r", body=b"", attempt_id=b"r" * 16)
    replay.headers["tmc-replay-of"] = "1-1-04-5"

    def answer(role: str, is_limited: bool) -> Any:
        proof = ("tmc-operator", f"Bearer {setting.tokens[role, is_limited]}")
        return setting.api("MessageService/Publish", replay, [*ours, proof])

    assert answer("viewer", False) == (DENIED, "ROLE_REQUIRED", "")
    assert answer("operator", True) == (DENIED, "TOPIC_NOT_ALLOWED", "")
    assert answer("operator", False).state == types_pb2.MESSAGE_STATE_COMMITTED


class TestCommandLine:
    def test_from_registration_to_removal(self, setting: Setting, tmp_path: Path) -> None:
        run = setting.center.run_admin
        made = run(
            "register-operator", "cli", "--role", "viewer", "--topic", "order.", "--valid", "90d", "--reason", "new"
        )
        token = json.loads(made.stdout)["token"]
        file = tmp_path / "token"
        file.write_text(f"{token}\n")
        me = json.loads(run("--token", "", "--token-file", str(file), "who-am-i").stdout)
        assert (me["name"], me["role"], me["topics"]) == ("cli", "ROLE_VIEWER", ["order."])
        over_the_environment = json.loads(run("--token-file", str(file), "who-am-i").stdout)
        assert over_the_environment["name"] == "cli"
        again = run("register-operator", "cli", "--role", "viewer", "--topic", "order.", "--reason", "new")
        assert "cli is registered already: `tmc admin rotate-token cli` makes another token." in again.stderr
        refused = run("--token", token, "pause-topic", OURS, "--reason", "x")
        assert (refused.returncode, "takes the role operator, and cli has the role viewer" in refused.stderr) == (
            1,
            True,
        )
        refused = run("--token", token, "get-check", THEIRS)
        assert "cli has rights for topics that begin with order., and this is about another one" in refused.stderr
        run("update-operator", "cli", "--role", "operator", "--all-topics", "--reads-bodies", "--reason", "on call")
        line = next(line for line in run("list-operators").stdout.splitlines() if line.startswith("cli "))
        assert line.split()[:4] == ["cli", "operator", "all", "yes"]
        rotated = run("--token", token, "rotate-token", "--valid", "30d", "--reason", "monthly")
        second = json.loads(rotated.stdout)["token"]
        prolonged = run("--token", second, "rotate-token", "--valid", "60d", "--overlap", "1h", "--reason", "longer")
        assert ("cannot be prolonged" in rotated.stderr, "cannot be prolonged" in prolonged.stderr) == (False, True)
        assert json.loads(run("--token", second, "who-am-i").stdout)["name"] == "cli"
        assert "effective_ms" in run("remove-operator", "cli", "--reason", "left").stdout
        assert "valid admin token" in run("--token", second, "who-am-i").stderr

    def test_the_trail_is_verified(self, setting: Setting) -> None:
        def sealed() -> bool:
            found = setting.api("AdminService/VerifyAudit", b"").databases
            return all(each.unsealed == 0 and each.verified for each in found)

        eventually(sealed)
        well = setting.center.run_admin("verify-audit")
        assert (well.returncode, "sealed without a secret), 0 not sealed yet" in well.stdout) == (0, True)
        catalog = setting.center.server.store.shards.catalog
        with catalog.transaction() as connection:
            connection.exec_driver_sql("UPDATE tmc_audit SET reason = 'because' WHERE seal_no = 3")
        bad = setting.center.run_admin("verify-audit")
        assert (bad.returncode, "Row 3 " in bad.stderr) == (1, True)
