"""Submit what a crash left in the ledger."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS

from tmc_client import django, errors


class Command(BaseCommand):
    help = "Submit the messages in this database's ledger whose submit was never answered."

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS)

    def handle(self, *_: Any, **options: Any) -> None:
        try:
            count = django.center().resume(django.connect(options["database"]))
        except errors.TmcError as exc:
            raise CommandError(str(exc)) from exc
        self.stdout.write(f"{count} messages were submitted")
