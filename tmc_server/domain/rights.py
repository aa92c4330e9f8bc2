"""Who may call which RPC. A method that is not listed is refused, and a test compares the list with the protos."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tmc_server.domain.operators import Role


class Scope(Enum):
    """How an admin RPC is limited to the topics that an operator's rights are for."""

    NONE = "it concerns no topic"
    ANSWER = "its answer contains those topics only"
    TOPIC = "its field `topic` names one"
    NAME = "its field `name` names one"
    MESSAGE = "it names a message, by id or by topic and key"
    FILTER = "the `topic` of its filter names one"
    JOB = "it names a bulk job, whose deliveries belong to topics"
    PROPOSAL = "it names a proposal, which is about a topic"
    EVERYTHING = "it concerns more than single topics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """Who may call it. role None: an app with its key; that topic or subscription are its own, the request itself checks."""

    role: Role | None = None
    scope: Scope = Scope.NONE


_APP_METHODS = {
    "MessageService": (
        "Prepare",
        "PrepareMany",
        "Submit",
        "SubmitMany",
        "Rollback",
        "RollbackMany",
        "Publish",
        "PublishMany",
        "Produce",
        "GetMessage",
        "DescribeChecks",
    ),
    "ConsumptionService": (
        "Ack",
        "AckMany",
        "Nack",
        "NackMany",
        "Extend",
        "ExtendMany",
        "Subscribe",
        "DescribeSubscriptions",
        "ReportForgedCopies",
    ),
}
_ADMIN_METHODS = {
    Role.VIEWER: {
        Scope.NONE: ("WhoAmI", "RotateOperatorToken", "ListApps", "ListServers", "GetShardMap", "ListInstances"),
        Scope.ANSWER: (
            "ListTopics",
            "ListSubscriptions",
            "GetOverview",
            "SearchMessages",
            "ListMessages",
            "ListConsumptions",
            "ListFailureGroups",
            "ListAlerts",
            "ListSilences",
            "ListBulkJobs",
            "ListProposals",
        ),
        Scope.TOPIC: ("GetTopicCheck",),
        Scope.MESSAGE: ("GetMessageDetail", "ExplainMessage", "GetTimeline"),
        Scope.FILTER: ("DryRunBulkJob",),
        Scope.JOB: ("GetBulkJob", "ListBulkItems"),
        Scope.EVERYTHING: ("ListAudit", "ListOperators", "GetConfiguration"),
    },
    Role.OPERATOR: {
        Scope.TOPIC: ("PauseSubscription", "ResumeSubscription", "RepairOrder", "ReactivateChecks", "SilenceAlerts"),
        Scope.NAME: ("PauseTopic", "ResumeTopic"),
        Scope.MESSAGE: (
            "ReactivateConsumption",
            "CancelConsumption",
            "DeliverNow",
            "ReplayDelivery",
            "CheckNow",
            "ReactivateCheck",
            "DecideMessage",
        ),
        Scope.FILTER: ("StartBulkJob",),
        Scope.JOB: ("StopBulkJob",),
        Scope.PROPOSAL: ("ApproveProposal", "RejectProposal"),
        Scope.EVERYTHING: ("AcknowledgeAlert", "EndSilence", "DrainServer", "UndrainServer"),
    },
    Role.ADMIN: {
        Scope.TOPIC: (
            "RegisterSubscription",
            "RemoveSubscription",
            "GetDeliveryKeys",
            "RotateDeliveryKey",
            "SetTopicCheck",
        ),
        Scope.MESSAGE: ("TryCheck",),
        Scope.NAME: ("RegisterTopic", "UpdateTopic"),
        Scope.EVERYTHING: (
            "VerifyAudit",
            "RegisterApp",
            "AddAppKey",
            "DropOldAppKey",
            "OpenSubmitQueue",
            "DropOldSubmitSecret",
            "CloseSubmitQueue",
            "RotateCheckToken",
            "DisableApp",
            "EnableApp",
            "RegisterOperator",
            "UpdateOperator",
            "RemoveOperator",
        ),
    },
}

RIGHTS: dict[str, Right] = {
    f"tmc.v1.{service}/{method}": Right() for service, methods in _APP_METHODS.items() for method in methods
} | {
    f"tmc.v1.AdminService/{method}": Right(role=role, scope=scope)
    for role, scopes in _ADMIN_METHODS.items()
    for scope, methods in scopes.items()
    for method in methods
}
