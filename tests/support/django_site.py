"""Django, set up once per process: sites of tests are databases of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.db import connections
from django.http import HttpResponse
from django.urls import path


def set_up(center: str = "127.0.0.1:1") -> None:
    """center: the first caller's stays."""
    if not settings.configured:
        settings.configure(
            ROOT_URLCONF=(path("", lambda _request: HttpResponse("the shop")),),
            ALLOWED_HOSTS=["*"],
            INSTALLED_APPS=["tmc_client.django"],
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
            TMC={"ADDRESS": center, "APP": "orders"},
        )
        django.setup()


def database(alias: str, **named: Any) -> None:
    """Replace a database. named: as in DATABASES."""
    set_up()
    connections[alias].close()
    del connections[alias]
    connections.settings[alias] = connections.configure_settings({"default": named})["default"]


def sqlite(alias: str, folder: Path) -> None:
    database(alias, ENGINE="django.db.backends.sqlite3", NAME=str(folder / "django.db"))
