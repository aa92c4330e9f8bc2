"""Delete what is long settled from the ledger."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS

import tmc_client
from tmc_client import django


class Command(BaseCommand):
    help = (
        "Delete rows of the ledger that were settled longer ago than --days, and of the inbox that are older than that."
    )

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS)
        parser.add_argument("--days", type=int, default=30)

    def handle(self, *_: Any, **options: Any) -> None:
        connect, age = django.connect(options["database"]), timedelta(days=options["days"])
        try:
            settled, handled = tmc_client.clean_ledger(connect, age), tmc_client.clean_inbox(connect, age)
        except (ValueError, tmc_client.TmcError) as exc:
            raise CommandError(str(exc)) from exc
        self.stdout.write(f"{settled} rows of the ledger and {handled} of the inbox were deleted")
