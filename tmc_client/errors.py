"""Exceptions of the SDK, grouped by what the caller should do next.

    TmcError                      .reason .field .message_id .retry_after .retryable
    |-- InvalidRequest            fix the call
    |   `-- CodecError            the body does not fit its declared type
    |-- NotAuthenticated          check app id and key
    |-- NotFound                  check topic, message id or subscription
    |-- KeyCommitted              this key was submitted before: the message exists (.message_id)
    |-- ContentDiffers            the attempt id was used before with different content
    |-- KeyInProgress             another attempt with this key is not decided yet (.message_id)
    |-- Decided                   the message was already decided the other way, or the delivery is closed
    |-- Overloaded      retryable repeat after .retry_after
    |-- Unavailable     retryable the center is away or restarting
    |   |-- DeadlineExceeded      no answer in time: the outcome is unknown, a retry with the same ids is safe
    |   `-- InboxDown             a handler's inbox cannot be used: its messages wait
    |-- Fenced                    the center knows that this transaction was rolled back: it must not commit
    `-- CenterFault               a fault of the center: its operators find it by the id in the text

Every call is retried until its deadline; an exception that reaches you is final for that call.
"""

from __future__ import annotations

from datetime import timedelta


class TmcError(Exception):
    """Base class. reason: the name of a tmc.v1.Reason, or "" for errors raised by the SDK itself."""

    retryable = False

    def __init__(
        self,
        text: str,
        *,
        reason: str = "",
        field: str = "",
        message_id: str = "",
        retry_after: timedelta = timedelta(0),
    ) -> None:
        super().__init__(text)
        self.reason = reason
        self.field = field
        self.message_id = message_id
        self.retry_after = retry_after


class InvalidRequest(TmcError):
    """A field is missing, too long or out of range; `field` names it."""


class MissingExtra(InvalidRequest):
    """A part of the SDK was used whose dependencies are not installed."""


class CodecError(InvalidRequest):
    """A body could not be turned into bytes, or bytes into the declared type."""


class NotAuthenticated(TmcError):
    """The key does not belong to the app, or the app lacks the permission."""


class NotFound(TmcError):
    """No such topic, message or subscription that you may use."""


class Gone(NotFound):
    """The message was closed so long ago that the center has removed it: there is nothing left to do."""


class KeyCommitted(TmcError):
    """The key was used by a message that was submitted: do not run the transaction again."""


class ContentDiffers(TmcError):
    """The attempt id was used before with different content."""


class KeyInProgress(TmcError):
    """Another attempt with this key is not decided yet: wait for its outcome."""


class Decided(TmcError):
    """The message was already decided the other way, or the delivery is closed."""


class Overloaded(TmcError):
    """The center is overloaded, or the app exceeds one of its limits."""

    retryable = True


class Unavailable(TmcError):
    """The center cannot be reached or cannot reach its database."""

    retryable = True


class DeadlineExceeded(Unavailable):
    """No answer in time. The call may have taken effect: retry with the same ids, or look up the message."""


class InboxDown(Unavailable):
    """The inbox of a handler cannot be used, mostly because its database is down: the message comes again, uncounted."""


class Fenced(TmcError):
    """A check was answered "rolled back" while this transaction was open, so it was rolled back. Run it again."""

    text = 'A check was answered "rolled back" while this transaction was open, so it was rolled back. Run it again.'


class OutOfOrder(TmcError):
    """A copy of a message whose turn is over: a later message of its order key has had its effect."""


class CenterFault(TmcError):
    """The center failed; the text carries the correlation id for its operators."""


class Reject(Exception):
    """Raise in a handler if the message can never be handled: it becomes FAILED at once and its owner is alerted."""


class Later(Exception):
    """Raise in a handler to redeliver after the given delay (at most a day) instead of by the retry policy."""

    def __init__(self, after: timedelta, reason: str = "later") -> None:
        if not isinstance(after, timedelta):
            raise TypeError(f"Later(after) is a timedelta, such as timedelta(seconds=60), not {after!r}.")
        super().__init__(reason)
        self.after = after


BY_REASON: dict[str, type[TmcError]] = {
    "MALFORMED_REQUEST": InvalidRequest,
    "FIELD_INVALID": InvalidRequest,
    "CREDENTIALS_MISSING": NotAuthenticated,
    "CREDENTIALS_INVALID": NotAuthenticated,
    "ADMIN_ONLY": NotAuthenticated,
    "ROLE_REQUIRED": NotAuthenticated,
    "TOPIC_NOT_ALLOWED": NotAuthenticated,
    "APP_DISABLED": NotAuthenticated,
    "KEY_OF_ANOTHER_TAG": NotAuthenticated,
    "CERTIFICATE_OF_ANOTHER": NotAuthenticated,
    "TOPIC_UNKNOWN": NotFound,
    "MESSAGE_UNKNOWN": NotFound,
    "MESSAGE_GONE": Gone,
    "SUBSCRIPTION_UNKNOWN": NotFound,
    "APP_UNKNOWN": NotFound,
    "OPERATOR_UNKNOWN": NotFound,
    "ALERT_UNKNOWN": NotFound,
    "BULK_JOB_UNKNOWN": NotFound,
    "PROPOSAL_UNKNOWN": NotFound,
    "APPROVAL_REQUIRED": Decided,
    "PROPOSAL_CLOSED": Decided,
    "KEY_COMMITTED": KeyCommitted,
    "CONTENT_DIFFERS": ContentDiffers,
    "NAME_TAKEN": Decided,
    "KEY_IN_PROGRESS": KeyInProgress,
    "ROW_LOCKED": Unavailable,
    "ALREADY_COMMITTED": Decided,
    "ALREADY_ROLLED_BACK": Decided,
    "CHECK_REFUSED": InvalidRequest,
    "FORWARD_REFUSED": InvalidRequest,
    "ROTATION_OPEN": Decided,
    "NOT_BUILT_IN": InvalidRequest,
    "DISCOVERY_UNAVAILABLE": Unavailable,
    "ATTEMPT_STALE": Decided,
    "CONSUMPTION_CLOSED": Decided,
    "QUEUE_FULL": Overloaded,
    "RATE_LIMITED": Overloaded,
    "OPEN_LIMIT": Overloaded,
    "UNACKED_LIMIT": Overloaded,
    "STORE_UNAVAILABLE": Unavailable,
    "CATALOG_STALE": Unavailable,
    "SHUTTING_DOWN": Unavailable,
    "NO_IDENTITY": Unavailable,
    "INTERNAL_FAULT": CenterFault,
}
