"""Django: blocks around the ORM, an inbox for its handlers, an outbox in its database.

    INSTALLED_APPS = [..., "tmc_client.django"]
    TMC = {"ADDRESS": "127.0.0.1:50051", "APP": "orders", "KEY": "..."}

    from tmc_client import django as tmc_django

    with tmc_django.transaction() as tx:
        order = Order.objects.create(...)
        tx.send("order.paid", {"order": order.pk}, key=f"paid-{order.pk}")

`python manage.py migrate` creates the tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections

import tmc_client
from tmc_client import errors
from tmc_client.recording import RecordedTransaction, sent

if TYPE_CHECKING:
    from tmc_client.center import Center
    from tmc_client.consuming.inbox import SqlInbox
    from tmc_client.outbox import Outbox
    from tmc_client.outbox.block import OutboxTransaction
    from tmc_client.producing.transaction import Transaction

__all__ = ["center", "connect", "forget_center", "inbox", "outbox_transaction", "sent", "transaction"]

_SETTINGS = ("ADDRESS", "APP", "KEY", "TAG", "CHECK_ADDRESS", "TLS", "TIMEOUT", "INSECURE", "PROXY")


_lock = threading.Lock()


def center() -> Center:
    """The center of `settings.TMC`, one per process. Raises InvalidRequest: the setting is missing or has unknown names."""
    with _lock:  # or threads that start together would make one each
        return _center()


def forget_center() -> None:
    """Forget the center, for tests that change `settings.TMC`."""
    _center.cache_clear()


@lru_cache
def _center() -> Center:
    given: dict[str, Any] = dict(getattr(settings, "TMC", None) or {})
    if missing := [name for name in ("ADDRESS", "APP") if not given.get(name)]:
        raise errors.InvalidRequest(
            f'settings.TMC lacks {missing[0]}: write TMC = {{"ADDRESS": "host:port", "APP": "..."}}.'
        )
    if unknown := sorted(set(given) - set(_SETTINGS)):
        raise errors.InvalidRequest(
            f"settings.TMC has {unknown[0]}, which is unknown: known are {', '.join(_SETTINGS)}."
        )
    return tmc_client.connect(given.pop("ADDRESS"), **{name.lower(): value for name, value in given.items()})


def transaction(*, using: str = DEFAULT_DB_ALIAS, fallback: Outbox | None = None) -> Transaction | RecordedTransaction:
    """Open a block as `Center.transaction`: it is the outermost `atomic()` of this database.

    Inside a django.test.TestCase nothing is sent: the messages are in `sent`.
    Raises InvalidRequest inside another `atomic()`, so also in a view with ATOMIC_REQUESTS.
    """
    from tmc_client.django.local import AtomicTransaction

    local = AtomicTransaction(using)
    return RecordedTransaction(local) if local.is_of_a_test else center().transaction(local, fallback=fallback)


def outbox_transaction(outbox: Outbox, *, using: str = DEFAULT_DB_ALIAS) -> OutboxTransaction | RecordedTransaction:
    """Open a block as `Outbox.transaction`; in a TestCase as `transaction`."""
    from tmc_client.django.local import AtomicTransaction

    local = AtomicTransaction(using)
    return RecordedTransaction(local) if local.is_of_a_test else outbox.transaction(local)


def inbox(*, using: str = DEFAULT_DB_ALIAS) -> SqlInbox:
    """Make an inbox for listeners whose handlers write with the ORM; they take no session."""
    from tmc_client.consuming.inbox import SqlInbox
    from tmc_client.django.local import HandlerTransaction

    return SqlInbox(lambda: HandlerTransaction(using), stays_in_thread=True)


def _past_its_pool(wrapper: Any) -> Any:
    """Django's pool never gets back what a wrapper does not give back: after a few of ours it would be empty for good."""
    options = wrapper.settings_dict.get("OPTIONS", {})
    if not options.get("pool"):
        return wrapper
    unpooled = {name: value for name, value in options.items() if name != "pool"}
    return type(wrapper)({**wrapper.settings_dict, "OPTIONS": unpooled}, alias=wrapper.alias)


def connect(using: str = DEFAULT_DB_ALIAS) -> Callable[[], Any]:
    """Return a function that makes new connections, for what takes one instead of an engine: center().checks, resume,
    tmc.Outbox, clean_ledger.
    """

    def new() -> Any:
        wrapper: Any = _past_its_pool(connections[using])
        connection = wrapper.get_new_connection(wrapper.get_connection_params())
        if wrapper.vendor == "sqlite":
            connection.isolation_level = "DEFERRED"  # Django begins by itself, SQLAlchemy leaves it to the driver
        return connection

    return new
