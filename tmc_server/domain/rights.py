"""Who may call which RPC. A method that is not listed is refused, and a test compares the list with the protos."""

from __future__ import annotations

from enum import Enum


class Right(Enum):
    """APP: an app with its key; ownership of topic or subscription is checked by the request itself."""

    APP = "app"
    ADMIN = "admin"


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
_ADMIN_METHODS = (
    "RegisterApp",
    "AddAppKey",
    "DropOldAppKey",
    "ListApps",
    "DisableApp",
    "EnableApp",
    "RotateCheckToken",
    "RegisterTopic",
    "UpdateTopic",
    "ListTopics",
    "RegisterSubscription",
    "RemoveSubscription",
    "ListSubscriptions",
    "GetDeliveryKeys",
    "RotateDeliveryKey",
    "GetMessageDetail",
    "GetOverview",
    "ExplainMessage",
    "GetTimeline",
    "ListMessages",
    "ListConsumptions",
    "ReactivateConsumption",
    "CancelConsumption",
    "ReplayDelivery",
    "DryRunBulkJob",
    "StartBulkJob",
    "StopBulkJob",
    "GetBulkJob",
    "ListBulkJobs",
    "ListBulkItems",
    "ListAlerts",
    "AcknowledgeAlert",
    "SilenceAlerts",
    "EndSilence",
    "ListSilences",
    "ListAudit",
    "PauseTopic",
    "ResumeTopic",
    "PauseSubscription",
    "ResumeSubscription",
    "RepairOrder",
    "ListServers",
    "DrainServer",
    "UndrainServer",
    "GetShardMap",
    "ListInstances",
    "SetTopicCheck",
    "GetTopicCheck",
    "CheckNow",
    "ReactivateCheck",
    "ReactivateChecks",
    "DecideMessage",
)

RIGHTS: dict[str, Right] = {
    f"tmc.v1.{service}/{method}": Right.APP for service, methods in _APP_METHODS.items() for method in methods
} | {f"tmc.v1.AdminService/{method}": Right.ADMIN for method in _ADMIN_METHODS}
