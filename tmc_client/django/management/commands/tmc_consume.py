"""Run a consumer with Django set up."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from tmc_client.consuming import loading
from tmc_client.consuming.consumer import Consumer


class Command(BaseCommand):
    help = "Run the consumer MODULE:NAME, e.g. shop.consumers:consumer, until SIGTERM or SIGINT."

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("consumer", metavar="MODULE:NAME")

    def handle(self, *_: Any, **options: Any) -> None:
        try:
            consumer = loading.load(options["consumer"], Consumer, "shop.consumers:consumer")
        except ValueError as exc:
            raise CommandError(str(exc)) from exc
        consumer.run()
