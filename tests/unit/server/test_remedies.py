"""The commands that `why` gives: each is one that `tmc admin` has, with all it needs."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer.main

from tmc_cli.admin import app
from tmc_server.requests.explanations import Why
from tmc_server.requests.remedies import commands_for

NAMES = {"message": "1-1-05-77", "topic": "order.paid", "app": "coupons", "tag": "default", "waits_for": "1-1-05-76"}
ADMIN: Any = typer.main.get_command(app)


@pytest.mark.parametrize("why", Why)
def test_every_command_is_complete(why: Why) -> None:
    commands = commands_for(why, **NAMES)
    for command in commands:
        name, *arguments = shlex.split(command)[2:]
        ADMIN.commands[name].make_context(name, arguments)  # raises when something is missing or unknown
    assert bool(commands) is (why.value.find("tmc admin") >= 0 and why is not Why.DUE)
