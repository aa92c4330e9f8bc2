"""The commands of `tmc admin`, in the order of its help."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tmc_cli.admin.alerts import print_alerts
from tmc_cli.admin.bulk import bulk, get_bulk
from tmc_cli.admin.checks import set_check, try_check
from tmc_cli.admin.messages import (
    print_consumptions,
    print_explanations,
    print_failures,
    print_messages,
    print_overview,
    print_timeline,
    stuck,
)
from tmc_cli.admin.operators import (
    fail_if_broken,
    print_audit,
    print_operators,
    print_seals,
    say_registered_already,
    update_operator,
)
from tmc_cli.admin.rpcs import Rpc
from tmc_cli.admin.servers import get_configuration
from tmc_cli.admin.subscriptions import say_nothing_repaired, subscribe, the_topic

_BY_ID = {"message_id": "id"}
_ALL_TOPICS = {"topic": "Without it: all topics."}

COMMANDS: Sequence[Rpc | Callable[..., None]] = (
    Rpc("RegisterApp", "Register a service; its key is in the answer, once.", "id"),
    Rpc("AddAppKey", "Create a second key for a rotation; both are valid. --tag: valid in one environment only.", "id"),
    Rpc("DropOldAppKey", "End a rotation: only the newest key stays valid. --tag: one environment's keys.", "id"),
    Rpc(
        "RotateCheckToken",
        "Replace the token that checks of an app's messages carry; services with the SDK learn the new one by themselves.",
        "id",
    ),
    Rpc(
        "DisableApp",
        "Refuse all calls of an app and end its streams. Its messages are still checked, its deliveries are kept.",
        "id",
    ),
    Rpc(
        "OpenSubmitQueue",
        "Take an app's messages from a queue of the broker too, or make another secret for it; shown once.",
        "id",
    ),
    Rpc("DropOldSubmitSecret", "End the rotation of a submit secret: only the newest stays valid.", "id"),
    Rpc("CloseSubmitQueue", "Take nothing from a submit queue any more; what is in it stays there.", "id"),
    Rpc("EnableApp", "Accept calls of a disabled app again.", "id"),
    Rpc("ListApps", "List apps."),
    Rpc(
        "RegisterTopic",
        "Register a topic of the app that produces it.",
        "name",
        required="owner",
        helps={"unacked_limit": "Refuse producers once this many deliveries are not acked; 0: no limit."},
    ),
    Rpc(
        "UpdateTopic",
        "Change the named settings of a topic. Tag, shards and queue mode cannot be changed.",
        "name",
        before=the_topic,
    ),
    Rpc(
        "PauseTopic",
        "Deliver nothing of a topic until it is resumed. Producers notice nothing; no attempt is counted.",
        "name",
    ),
    Rpc("ResumeTopic", "Deliver a paused topic again.", "name"),
    Rpc("ListTopics", "List topics."),
    subscribe,
    Rpc("RemoveSubscription", "Remove a subscription and cancel its open deliveries.", "topic app", name="unsubscribe"),
    Rpc(
        "PauseSubscription",
        "Deliver nothing to a subscription until it is resumed. No attempt is counted.",
        "topic app",
    ),
    Rpc("ResumeSubscription", "Deliver to a paused subscription again.", "topic app"),
    Rpc(
        "RepairOrder",
        "Examine all order keys of a subscription now, and repair what is wrong. Servers do this by themselves, slowly.",
        "topic app",
        after=say_nothing_repaired,
        timeout_s=150,
    ),
    Rpc("ListSubscriptions", "List the subscriptions of one topic, or all."),
    Rpc(
        "GetDeliveryKeys",
        "Show the keys that sign a subscription's copies, for consumers in other languages. Audited.",
        "topic app",
        name="delivery-keys",
    ),
    Rpc(
        "RotateDeliveryKey",
        "Sign a subscription's copies with a new key. Copies already in queues stay valid.",
        "topic app",
        timeout_s=20,
    ),
    Rpc(
        "GetMessageDetail",
        "Show a message with its deliveries and failed attempts, by id or by --topic and --key.",
        "message_id?",
        name="get-message",
        names=_BY_ID,
    ),
    Rpc(
        "GetOverview",
        "Show what stands where: undecided messages, and deliveries under way and failed, with the age of the oldest.",
        name="overview",
        prints=print_overview,
        can_watch=True,
    ),
    Rpc(
        "SearchMessages",
        "Find messages by id or key.",
        "text",
        name="search",
        page_size=100,
        prints=print_messages,
        helps=_ALL_TOPICS,
    ),
    Rpc(
        "ListFailureGroups",
        "Show what fails for the same reason, the largest group first, with the command that tries it again.",
        "topic?",
        name="failures",
        defaults={"limit": 100},
        prints=print_failures,
        helps=_ALL_TOPICS,
    ),
    Rpc(
        "ExplainMessage",
        "Say why a message is where it is and what to do about it, by id or by --topic and --key.",
        "message_id?",
        name="why",
        names=_BY_ID,
        prints=print_explanations,
    ),
    Rpc(
        "GetTimeline",
        "Show what happened to a message, in order, by id or by --topic and --key.",
        "message_id?",
        name="timeline",
        names=_BY_ID,
        prints=print_timeline,
    ),
    stuck,
    Rpc(
        "ListMessages",
        "List messages.",
        "topic?",
        page_size=100,
        prints=print_messages,
        helps=_ALL_TOPICS,
    ),
    Rpc(
        "ListConsumptions",
        "List deliveries.",
        "topic?",
        page_size=100,
        prints=print_consumptions,
        helps=_ALL_TOPICS,
    ),
    Rpc(
        "ReactivateConsumption",
        "Retry a FAILED delivery with a fresh retry budget.",
        "message_id app",
        name="reactivate",
    ),
    Rpc(
        "DeliverNow", "Deliver a SCHEDULED delivery now instead of at its due time. Uses up no retry.", "message_id app"
    ),
    Rpc(
        "CancelConsumption",
        "Give a delivery up for good. The next message of its order key is delivered.",
        "message_id app",
        name="cancel",
    ),
    Rpc(
        "ReplayDelivery",
        "Send an acked message again to one subscriber, as a new message; its handler runs again.",
        "message_id app",
        name="replay",
    ),
    bulk,
    get_bulk,
    Rpc(
        "StopBulkJob",
        "Stop a bulk job. What is done stays done; stopped before its start time, nothing has happened.",
        "job",
        name="stop-bulk",
    ),
    Rpc("ListBulkJobs", "List bulk jobs, newest first.", name="list-bulk", page_size=20),
    Rpc("ListBulkItems", "List what a bulk job did to each delivery.", "job", page_size=100),
    Rpc(
        "ListAlerts",
        "List alerts, newest first; those of one kind, topic, subscriber and error are one.",
        prints=print_alerts,
    ),
    Rpc("AcknowledgeAlert", "Get no further reminders of an alert. That it is resolved is still sent.", "alert_id"),
    Rpc(
        "SilenceAlerts",
        "Send no notices of some alerts for a while. Alerts that are still open then are sent afterward.",
        required="for_ms",
        helps={
            "topic": "Without it: all topics.",
            "app": "Only its subscription to the topic.",
            "kind": "Such as 'delivery failed'; without it: all kinds.",
        },
    ),
    Rpc("EndSilence", "End a silence before its time.", "silence"),
    Rpc("ListSilences", "List the silences that are in effect."),
    Rpc(
        "ListAudit",
        "List what was changed, by whom, when and why, the newest first.",
        names={"message_id": "message", "from_ms": "since"},
        page_size=100,
        prints=print_audit,
        helps={
            "actor": "Done by this operator.",
            "action": 'As the trail has it, for example "pause topic".',
            "message_id": "Id of a message: what was done to it and its deliveries.",
            "to_ms": "Done before this time.",
        },
    ),
    Rpc(
        "VerifyAudit",
        "Verify the seals of the audit trail. Exit code 1: a row was changed or removed.",
        prints=print_seals,
        after=fail_if_broken,
        timeout_s=600,
    ),
    Rpc("WhoAmI", "Show the operator that the token belongs to."),
    Rpc(
        "RegisterOperator",
        "Register an operator; the token is in the answer, once.",
        "name",
        required="role",
        after=say_registered_already,
    ),
    update_operator,
    Rpc(
        "RotateOperatorToken",
        "Make another token for an operator, by default for yourself; it is in the answer, once.",
        "name?",
        name="rotate-token",
        defaults={"overlap_ms": "1h"},
        helps={"name": "Without it: your own."},
    ),
    Rpc("RemoveOperator", "Remove an operator; the tokens are refused from then on.", "name"),
    Rpc("ListOperators", "List operators, with their rights and when their tokens expire.", prints=print_operators),
    Rpc("ListServers", "List servers, alive and gone, and the shards each one holds."),
    Rpc(
        "DrainServer",
        "Let a server look after no shards, without stopping it; others take over. It still serves calls.",
        "server",
    ),
    Rpc("UndrainServer", "Let a drained server look after its share of the shards again.", "server"),
    Rpc("GetShardMap", "Show which database holds which shard.", name="shard-map"),
    Rpc(
        "ListInstances",
        "List the addresses at which a producer's service would be checked now.",
        "app",
        defaults={"tag": "default"},
    ),
    set_check,
    Rpc("GetTopicCheck", "Show how undecided messages of a topic are checked.", "topic", name="get-check"),
    Rpc(
        "CheckNow",
        "Check one undecided message now; shows the target, the request, the answer, the verdict and the duration.",
        "message_id",
        timeout_s=150,
    ),
    try_check,
    Rpc("ReactivateCheck", "Check a CHECK_FAILED message again.", "message_id"),
    Rpc(
        "ReactivateChecks",
        "Check all CHECK_FAILED messages of a topic again. --dry-run only counts them.",
        "topic",
        timeout_s=150,
    ),
    Rpc(
        "DecideMessage",
        "Decide an undecided message by hand.",
        "message_id verdict",
        name="decide",
        helps={"verdict": "COMMIT or ROLLBACK."},
    ),
    Rpc("ListProposals", "List what needs the approval of a second operator, newest first.", page_size=20),
    Rpc("ApproveProposal", "Approve what another operator proposed, and do it.", "proposal", name="approve"),
    Rpc(
        "RejectProposal",
        "Reject what another operator proposed, or withdraw your own proposal.",
        "proposal",
        name="reject",
    ),
    get_configuration,
)
