"""What can go wrong for a user of the SDK, by what to do next.

    TmcError                      .reason .field .message_id .retry_after .retryable
    |-- InvalidRequest            fix the call
    |   `-- CodecError            the body does not fit its declared type
    |-- NotAuthenticated          check app id and key
    |-- NotFound                  check topic, message id or subscription
    |-- KeyCommitted              somebody sent this key before: the message exists (.message_id)
    |-- ContentDiffers            one attempt id, two contents
    |-- KeyInProgress             another attempt with this key is not decided yet (.message_id)
    |-- Decided                   it was decided the other way before, or the delivery is closed
    |-- Overloaded      retryable repeat after .retry_after
    |-- Unavailable     retryable the center is away or restarting
    |   `-- DeadlineExceeded      no answer in time: the outcome is not known, a repeat with the same ids is safe
    |-- Fenced                    the center knows that this transaction was rolled back: it must not commit
    `-- CenterFault               a fault of the center: its operators find it by the id in the text

Every call has a deadline and repeats itself while that lasts; what reaches you is final for that call.
"""

from __future__ import annotations

from datetime import timedelta


class TmcError(Exception):
    """The base. reason: a name of tmc.v1.Reason, or "" for errors made in the SDK."""

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


class CodecError(InvalidRequest):
    """A body could not be turned into bytes, or bytes into the declared type."""


class NotAuthenticated(TmcError):
    """App and key do not belong together, or the right is missing."""


class NotFound(TmcError):
    """No such topic, message or subscription that you may use."""


class Gone(NotFound):
    """The message was closed so long ago that the center has removed it: there is nothing left to do."""


class KeyCommitted(TmcError):
    """The key was used by a message that was submitted: do not run the transaction again."""


class ContentDiffers(TmcError):
    """The attempt id was used with another content."""


class KeyInProgress(TmcError):
    """Another attempt with this key is not decided yet: wait for its outcome."""


class Decided(TmcError):
    """The message or delivery was decided otherwise before."""


class Overloaded(TmcError):
    """The center has too much to do, or you send too fast."""

    retryable = True


class Unavailable(TmcError):
    """The center cannot be reached or cannot reach its database."""

    retryable = True


class DeadlineExceeded(Unavailable):
    """No answer in time. What was asked may have happened: repeat with the same ids, or ask for the message."""


class Fenced(TmcError):
    """A check was answered "rolled back" while this transaction was open; it was rolled back now. Run it again."""


class CenterFault(TmcError):
    """The center failed; the text carries the correlation id for its operators."""


class Reject(Exception):
    """Raise in a handler: this message can never be handled. FAILED at once, its owner is alerted."""


class Later(Exception):
    """Raise in a handler: deliver it again after the given time (a day at most) instead of by the retry policy."""

    def __init__(self, after: timedelta, reason: str = "later") -> None:
        super().__init__(reason)
        self.after = after


BY_REASON: dict[str, type[TmcError]] = {
    "MALFORMED_REQUEST": InvalidRequest,
    "FIELD_INVALID": InvalidRequest,
    "CREDENTIALS_MISSING": NotAuthenticated,
    "CREDENTIALS_INVALID": NotAuthenticated,
    "ADMIN_ONLY": NotAuthenticated,
    "APP_DISABLED": NotAuthenticated,
    "KEY_OF_ANOTHER_TAG": NotAuthenticated,
    "CERTIFICATE_OF_ANOTHER": NotAuthenticated,
    "TOPIC_UNKNOWN": NotFound,
    "MESSAGE_UNKNOWN": NotFound,
    "MESSAGE_GONE": Gone,
    "SUBSCRIPTION_UNKNOWN": NotFound,
    "APP_UNKNOWN": NotFound,
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
    "STORE_UNAVAILABLE": Unavailable,
    "CATALOG_STALE": Unavailable,
    "SHUTTING_DOWN": Unavailable,
    "NO_IDENTITY": Unavailable,
    "INTERNAL_FAULT": CenterFault,
}
