"""Every way a request can be refused, one sentence a class, split by what the caller does next.

    TmcError
    |-- Fix the request       InvalidField, MalformedRequest, TopicUnknown, MessageUnknown, SubscriptionUnknown,
    |                         AlertUnknown, AppUnknown, BulkJobUnknown, ProposalUnknown, OperatorUnknown, NameTaken,
    |                         ContentDiffers
    |-- Prove who you are     CredentialsMissing, CredentialsInvalid, AdminOnly, RoleRequired, TopicNotAllowed, AppDisabled,
    |                         KeyOfAnotherTag, CertificateOfAnother
    |-- Accept the outcome    CheckRefused, ForwardRefused, KeyCommitted, AlreadyCommitted, AlreadyRolledBack, AttemptStale,
    |                         ConsumptionClosed, MessageGone, RotationOpen, NotBuiltIn, ApprovalRequired, ProposalClosed
    |-- Repeat later          Retryable
    |   |                     KeyInProgress, RowLocked, QueueFull, RateLimited, OpenLimit,
    |   |                     UnackedLimit
    |   `-- Unavailable       StoreUnavailable, CatalogStale, ShuttingDown, NoIdentity, DiscoveryUnavailable
    `-- Ask the operators     InternalFault

`text` is the sentence that callers get by default. (A docstring would be missing under `python -OO`.)
`reason` is the name in the published enum tmc.v1.Reason; rpc/status.py maps classes to gRPC statuses.
"""

from __future__ import annotations

from typing import Self


class TmcError(Exception):
    """The base: a published reason and a sentence that says what to do."""

    reason = "INTERNAL_FAULT"
    text = ""

    def __init__(
        self, sentence: str = "", *, field: str = "", message_id: str = "", retry_after_ms: int | None = None
    ) -> None:
        self.sentence = sentence or self.text
        self.field = field
        self.message_id = message_id
        self.retry_after_ms = retry_after_ms if retry_after_ms is not None else self.default_retry_after_ms
        super().__init__(self.sentence)

    default_retry_after_ms = 0


class InvalidField(TmcError):
    """A field of the request is missing, too long or out of range."""

    reason = "FIELD_INVALID"

    def __init__(self, field: str, must: str) -> None:
        super().__init__(f"{field} must {must}.", field=field)


class MalformedRequest(TmcError):
    text = "The bytes are not a request of this method: compare your protos with the center's."
    reason = "MALFORMED_REQUEST"


class TopicUnknown(TmcError):
    text = "There is no such topic that your app may use: register it, or check its name and owner."
    reason = "TOPIC_UNKNOWN"

    @classmethod
    def for_operators(cls, name: str) -> Self:
        """Return the error as operators read it."""
        return cls(f"There is no topic {name!r}: list the topics to see their names.")


class MessageUnknown(TmcError):
    text = "There is no such message of yours: prepare it first, or check the id."
    reason = "MESSAGE_UNKNOWN"


class MessageGone(TmcError):
    text = "The message was closed long ago and is no longer kept: there is nothing left to do."
    reason = "MESSAGE_GONE"


class SubscriptionUnknown(TmcError):
    text = "Your app and tag have no such subscription, or it never got this message."
    reason = "SUBSCRIPTION_UNKNOWN"

    @classmethod
    def for_operators(cls) -> Self:
        """Return the error as operators read it."""
        return cls("There is no such subscription: list them to see topic, app and tag.")


class AppUnknown(TmcError):
    text = "There is no such app: register it first."
    reason = "APP_UNKNOWN"

    @classmethod
    def for_operators(cls, id_: str) -> Self:
        """Return the error as operators read it."""
        return cls(f"There is no app {id_!r}: list the apps to see their ids.")


class BulkJobUnknown(TmcError):
    text = "There is no such bulk job: list the jobs to see their numbers."
    reason = "BULK_JOB_UNKNOWN"


class ProposalUnknown(TmcError):
    text = "There is no such proposal: list the proposals to see their numbers."
    reason = "PROPOSAL_UNKNOWN"


class ApprovalRequired(TmcError):
    text = "A second operator has to approve this."
    reason = "APPROVAL_REQUIRED"


class ProposalClosed(TmcError):
    text = "The proposal was approved, rejected, or has expired."
    reason = "PROPOSAL_CLOSED"


class AlertUnknown(TmcError):
    text = "There is no such alert or silence: list them to see their ids."
    reason = "ALERT_UNKNOWN"


class NameTaken(TmcError):
    text = "That name is registered with other settings: choose another name or the same settings."
    reason = "NAME_TAKEN"


class ContentDiffers(TmcError):
    text = (
        "This attempt id was used for another body, header, order key or delay: make a new attempt id for each new "
        "content."
    )
    reason = "CONTENT_DIFFERS"


class CredentialsMissing(TmcError):
    text = "Say who you are: connect(app=..., key=...), or 'tmc-app' and 'authorization: Bearer KEY' as metadata or headers."
    reason = "CREDENTIALS_MISSING"


class CredentialsInvalid(TmcError):
    text = "App and key do not belong together: check both."
    reason = "CREDENTIALS_INVALID"


class AdminOnly(TmcError):
    text = (
        "This needs a valid admin token: TMC_ADMIN_TOKEN, TMC_ADMIN_TOKEN_FILE, --token, or metadata "
        "'authorization: Bearer TOKEN'."
    )
    reason = "ADMIN_ONLY"


class RoleRequired(TmcError):
    text = "Your role does not include this: ask an administrator of the center."
    reason = "ROLE_REQUIRED"


class TopicNotAllowed(TmcError):
    text = "Your rights are limited to other topics: ask an administrator of the center."
    reason = "TOPIC_NOT_ALLOWED"


class OperatorUnknown(TmcError):
    text = "There is no such operator: list them to see their names."
    reason = "OPERATOR_UNKNOWN"


class AppDisabled(TmcError):
    text = "An operator has disabled your app: ask the center's operators; its messages and deliveries are kept."
    reason = "APP_DISABLED"


class KeyOfAnotherTag(TmcError):
    text = "This key works in one environment only, and the call says another one: use the key of that environment."
    reason = "KEY_OF_ANOTHER_TAG"


class CertificateOfAnother(TmcError):
    text = (
        "Your client certificate does not name the app that you say you are: connect with the certificate of that app."
    )
    reason = "CERTIFICATE_OF_ANOTHER"


class KeyCommitted(TmcError):
    text = "Another attempt with this key was submitted before: the message exists, do not run your transaction again."
    reason = "KEY_COMMITTED"


class AlreadyCommitted(TmcError):
    text = "The message was submitted before and cannot be rolled back."
    reason = "ALREADY_COMMITTED"


class AlreadyRolledBack(TmcError):
    text = "This attempt was rolled back before: start a new one with a new attempt id."
    reason = "ALREADY_ROLLED_BACK"


class CheckRefused(TmcError):
    text = "A check like this cannot work."
    reason = "CHECK_REFUSED"


class ForwardRefused(TmcError):
    text = "The target of the forward does not exist, or this could not be confirmed."
    reason = "FORWARD_REFUSED"


class RotationOpen(TmcError):
    text = "The app has two keys: drop the old one first, or ask to replace the newest if its answer was lost."
    reason = "ROTATION_OPEN"


class NotBuiltIn(TmcError):
    text = "This center delivers through RabbitMQ: read the queue that DescribeSubscriptions names."
    reason = "NOT_BUILT_IN"


class AttemptStale(TmcError):
    text = "This is not the current attempt: a newer copy is on its way, and its outcome counts instead."
    reason = "ATTEMPT_STALE"


class ConsumptionClosed(TmcError):
    text = "The delivery is acked, failed or cancelled already, or waits for an earlier one: nothing was changed."
    reason = "CONSUMPTION_CLOSED"


class Retryable(TmcError):
    text = "Nothing is wrong with the request: repeat it, with the same ids."


class KeyInProgress(Retryable):
    text = "Another attempt with this key is not decided yet: wait for its outcome."
    reason = "KEY_IN_PROGRESS"
    default_retry_after_ms = 1000


class RowLocked(Retryable):
    text = "Another operation is working on this message: repeat."
    reason = "ROW_LOCKED"
    default_retry_after_ms = 200


class QueueFull(Retryable):
    text = "The center has more work than it can queue: repeat after the given time."
    reason = "QUEUE_FULL"
    default_retry_after_ms = 200


class RateLimited(Retryable):
    text = "Your app sends more than its rate: repeat after the given time."
    reason = "RATE_LIMITED"
    default_retry_after_ms = 1000


class OpenLimit(Retryable):
    text = "The topic has too many undecided messages: submit or roll back some, then repeat."
    reason = "OPEN_LIMIT"
    default_retry_after_ms = 5000


class UnackedLimit(Retryable):
    text = "Too many deliveries of this topic wait for their consumers: repeat when they have caught up."
    reason = "UNACKED_LIMIT"
    default_retry_after_ms = 5000


class Unavailable(Retryable):
    text = "The center cannot answer now: repeat with the same ids."

    default_retry_after_ms = 500


class StoreUnavailable(Unavailable):
    text = "The database did not answer: repeat with the same ids, the outcome of this attempt is unknown."
    reason = "STORE_UNAVAILABLE"
    lacks_table = False

    @classmethod
    def table_missing(cls) -> StoreUnavailable:
        """Return what is raised where a table is not there: nothing of the transaction was done."""
        made = cls("A table of this shard is missing: it is being moved, or the database is being restored. Repeat.")
        made.lacks_table = True
        return made


class CatalogStale(Unavailable):
    text = "This server has not read the catalog lately and might miss a subscriber: repeat."
    reason = "CATALOG_STALE"


class ShuttingDown(Unavailable):
    text = "This server is stopping: repeat, another one will answer."
    reason = "SHUTTING_DOWN"


class NoIdentity(Unavailable):
    text = "This server lost its node slot and is taking another: repeat."
    reason = "NO_IDENTITY"


class DiscoveryUnavailable(Unavailable):
    text = "Service discovery does not answer, and no earlier answer is known: repeat when it is back."
    reason = "DISCOVERY_UNAVAILABLE"


class InternalFault(TmcError):
    text = "A fault of the center: tell its operators the correlation id."


def leaves(root: type[TmcError] = TmcError) -> list[type[TmcError]]:
    """Return all error classes that are raised, for the tests and docs that walk the tree."""
    below = root.__subclasses__()
    return [root] if not below else [leaf for child in below for leaf in leaves(child)]
