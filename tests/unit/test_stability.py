"""Programs and scripts of others rely on interfaces: interfaces_promised.txt lists them, docs/stability.md says for how long.

A line that is missing was removed or changed: keep the old form beside the new one, and name it in the changelog.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import io
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

import tmc_client
import tmc_client.aio
import tmc_client.django
import tmc_client.testing
from tmc_cli import COMMANDS
from tmc_client import tables
from tmc_client.checks.answers import Checks
from tmc_client.producing.block import Block
from tmc_server.config import Config
from tmc_server.domain import manifest
from tmc_server.metrics import METRICS

PROMISED = Path(__file__).with_name("interfaces_promised.txt")
ROOT = Path(__file__).parents[2]
_GIVEN = (Block, Checks)
"""Classes of what methods return."""
_MADE_BY_US = {tmc_client.Center, tmc_client.aio.AsyncCenter, *_GIVEN}
"""Classes that programs use and do not make: how they are made is our own affair."""


def _signature(prefix: str, of: Callable[..., Any]) -> Iterator[str]:
    """Yield a line for the callable and one for each parameter; types and defaults may get wider."""
    yield prefix
    place = 0
    for parameter in inspect.signature(of).parameters.values():
        if parameter.name.startswith("_") or parameter.name in ("self", "cls"):
            continue
        place += 1
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        where = "" if star or parameter.kind is parameter.KEYWORD_ONLY else f" in place {place}"
        yield f"{prefix} {star}{parameter.name}{where}"
        if parameter.default is not parameter.empty:
            yield f"{prefix} {parameter.name} may be left out"


def _members(prefix: str, of: type) -> Iterator[str]:
    if issubclass(of, enum.Enum):
        yield from (f"{prefix}.{member.name} = {member.value}" for member in of)
        return
    if issubclass(of, BaseException):
        yield f"{prefix} is a {', '.join(base.__name__ for base in of.__bases__)}"
    else:
        if of not in _MADE_BY_US:
            yield from _signature(prefix, of)
    for name, member in inspect.getmembers(of):
        if name.startswith("_") or not (getattr(member, "__module__", None) or "tmc").startswith("tmc"):
            continue
        if inspect.isfunction(member) or inspect.ismethod(member):
            yield from _signature(f"{prefix}.{name}", member)
        elif isinstance(member, property):
            yield f"{prefix}.{name}"


def _sdk() -> Iterator[str]:
    modules = (tmc_client, tmc_client.aio, tmc_client.django, tmc_client.testing)
    for module in modules:
        for name in module.__all__:
            named = f"sdk {module.__name__}.{name}"
            member = getattr(module, name)
            if inspect.isclass(member):
                yield named
                yield from _members(named, member)
            elif callable(member):
                yield from _signature(named, member)
            else:
                yield named
    for given in _GIVEN:
        yield from _members(f"sdk {given.__module__}.{given.__name__}", given)


def _tables() -> Iterator[str]:
    for table in tables.metadata.tables.values():
        yield from (f"table {table.name}.{column.name}" for column in table.columns)


def _settings(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if inspect.isclass(inner) and issubclass(inner, BaseModel):
            yield from _settings(inner, f"{prefix}{name}.")
        else:
            yield f"setting {prefix}{name}"


def _metrics() -> Iterator[str]:
    for family in METRICS.registry.collect():
        if family.name.startswith("tmc_"):
            yield f"metric {family.name} {family.type}"


def _events() -> Iterator[str]:
    page = (ROOT / "docs" / "logs.md").read_text()
    yield from (f"log event {name}" for name in re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))


def _options(path: str, command: Any) -> Iterator[str]:
    """command: of Typer, which brings a Click of its own."""
    yield f"command {path}"
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.hidden and "completion" not in parameter.name:
            yield from (f"command {path} {name}" for name in (*parameter.opts, *parameter.secondary_opts))
    for name, inner in getattr(command, "commands", {}).items():
        yield from _options(f"{path} {name}", inner)


def _commands() -> Iterator[str]:
    for name, command in COMMANDS.items():
        module, _, attribute = command.target.partition(":")
        app = getattr(import_module(module), attribute)
        if isinstance(app, typer.Typer):
            yield from _options(f"tmc {name}", typer.main.get_command(app))
            continue
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            app(args=["--help"], prog_name=f"tmc {name}")
        yield f"command tmc {name}"
        options = re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", said.getvalue(), re.MULTILINE)
        yield from (f"command tmc {name} {option}" for option in options)


def current() -> list[str]:
    found = {*_sdk(), *_tables(), *_settings(Config, ""), *_metrics(), *_events(), *_commands()}
    return sorted({*found, f"manifest format {manifest.FORMAT}"})


@pytest.fixture(scope="module")
def lines() -> set[str]:
    return set(current())


def test_nothing_that_was_promised_is_changed_or_removed(lines: set[str]) -> None:
    assert set(PROMISED.read_text().splitlines()) - lines == set()


def test_what_is_new_is_promised_from_now_on(lines: set[str]) -> None:
    fresh = lines - set(PROMISED.read_text().splitlines())
    assert fresh == set(), "add these lines to interfaces_promised.txt, in order: python -m tests.unit.test_stability"


@pytest.mark.parametrize(
    "line",
    [
        "sdk tmc_client.Center.publish topic in place 1",
        "sdk tmc_client.producing.block.Block.send",
        "table tmc_ledger.",
        "setting server.listen",
        "metric tmc_",
        "log event ",
        "command tmc admin register-topic --owner",
        "command tmc size --messages-per-second",
    ],
)
def test_each_kind_is_listed(line: str, lines: set[str]) -> None:
    assert any(each.startswith(line) for each in lines)


if __name__ == "__main__":
    PROMISED.write_text("\n".join(sorted({*PROMISED.read_text().splitlines(), *current()})) + "\n")
