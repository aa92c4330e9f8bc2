"""The application for INSTALLED_APPS, and its system checks."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks

from tmc_client import django, errors
from tmc_client.consuming.calling import around_handlers
from tmc_client.django import fitness


class TmcConfig(AppConfig):
    name = "tmc_client.django"
    label = "tmc"
    verbose_name = "Transaction message center"

    def ready(self) -> None:
        around_handlers(fitness.before_handler, fitness.after_handler)
        checks.register(_check_settings)
        checks.register(_check_requests)
        checks.register(_check_sqlite)


def _check_settings(**_: Any) -> list[checks.CheckMessage]:
    try:
        django.center()
    except (errors.TmcError, TypeError, ValueError) as exc:
        return [checks.Error(str(exc), id="tmc.E001")]
    return []


def _check_sqlite(**_: Any) -> list[checks.CheckMessage]:
    return [
        checks.Warning(
            f"Database {alias!r} is SQLite without transaction_mode: a block that reads first fails while somebody else writes.",
            hint='Give it "OPTIONS": {"transaction_mode": "IMMEDIATE"}.',
            id="tmc.W002",
        )
        for alias, database in settings.DATABASES.items()
        if database["ENGINE"].endswith("sqlite3") and not database.get("OPTIONS", {}).get("transaction_mode")
    ]


def _check_requests(**_: Any) -> list[checks.CheckMessage]:
    atomic = [alias for alias, database in settings.DATABASES.items() if database.get("ATOMIC_REQUESTS")]
    return [
        checks.Warning(
            f"Database {alias!r} has ATOMIC_REQUESTS: tmc_client.django.transaction() is refused inside its requests.",
            hint="Decorate views that use it with @transaction.non_atomic_requests, and silence this: SILENCED_SYSTEM_CHECKS.",
            id="tmc.W001",
        )
        for alias in atomic
    ]
