"""Client of the transaction message center.

    import tmc_client as tmc
    center = tmc.connect("127.0.0.1:50051", app="orders", key=KEY)
    with center.transaction(session) as tx:
        tx.send("order.paid", {"order": 7}, key="paid-7")

SQLAlchemy is imported only by what needs it: transactions, ledger, inbox, outbox.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tmc_client.center import Center, connect
from tmc_client.checks.questions import Question, Verdict
from tmc_client.codecs import Topic, topic
from tmc_client.connecting.connection import Tls
from tmc_client.consuming.consumer import Consumer
from tmc_client.consuming.listeners import MessageConsumer
from tmc_client.consuming.received import Message
from tmc_client.errors import (
    CenterFault,
    CodecError,
    ContentDiffers,
    DeadlineExceeded,
    Decided,
    Fenced,
    Gone,
    InvalidRequest,
    KeyCommitted,
    KeyInProgress,
    Later,
    MissingExtra,
    NotAuthenticated,
    NotFound,
    OutOfOrder,
    Overloaded,
    Reject,
    TmcError,
    Unavailable,
)
from tmc_client.producing.producer import Prepared, new_attempt_id

if TYPE_CHECKING:
    from tmc_client.cleaning import clean_inbox, clean_ledger
    from tmc_client.consuming.inbox import SqlInbox
    from tmc_client.outbox import Outbox
    from tmc_client.outbox.rabbitmq_target import RabbitTarget
    from tmc_client.producing.ledger import create_tables

__all__ = [
    "Center",
    "CenterFault",
    "CodecError",
    "Consumer",
    "ContentDiffers",
    "DeadlineExceeded",
    "Decided",
    "Fenced",
    "Gone",
    "InvalidRequest",
    "KeyCommitted",
    "KeyInProgress",
    "Later",
    "Message",
    "MessageConsumer",
    "MissingExtra",
    "NotAuthenticated",
    "NotFound",
    "OutOfOrder",
    "Outbox",
    "Overloaded",
    "Prepared",
    "Question",
    "RabbitTarget",
    "Reject",
    "SqlInbox",
    "Tls",
    "TmcError",
    "Topic",
    "Unavailable",
    "Verdict",
    "clean_inbox",
    "clean_ledger",
    "connect",
    "create_tables",
    "new_attempt_id",
    "topic",
]

_LAZY = {
    "Outbox": "tmc_client.outbox",
    "RabbitTarget": "tmc_client.outbox.rabbitmq_target",
    "SqlInbox": "tmc_client.consuming.inbox",
    "clean_inbox": "tmc_client.cleaning",
    "clean_ledger": "tmc_client.cleaning",
    "create_tables": "tmc_client.producing.ledger",
}


def __getattr__(name: str) -> Any:
    """Import names that need SQLAlchemy, and compute `__version__`, only on first use."""
    if name == "__version__":
        from importlib.metadata import version

        return version("tmc-client")
    if name in _LAZY:
        import importlib

        from tmc_client.extras import needed_by

        with needed_by(f"tmc.{name}"):
            return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tmc_client' has no attribute {name!r}")
