"""The house: who may import whom, what is exported, what the docs say about the tables."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tmc_client
from tmc_client import errors as client_errors
from tmc_client.protocol import types_pb2
from tmc_pipeline.settings import Settings
from tmc_server import errors
from tmc_server.config import Config
from tmc_server.domain import consumption, message
from tmc_server.domain.catalog import App
from tmc_server.domain.rights import RIGHTS
from tmc_server.rpc.server import SERVICES
from tmc_server.rpc.status import CODES

ROOT = Path(__file__).parents[2]

# Room -> rooms it may import. errors and the protos' vocabulary are open to all but the domain's purity.
ALLOWED = {
    "domain": {"domain", "errors"},
    "store": {"store", "domain", "errors", "metrics"},
    "delivery": {"delivery", "domain", "errors", "metrics"},
    "discovery": {"discovery", "domain", "errors"},
    "alerts": {"alerts", "domain", "errors", "outgoing"},
    "archives": {"archives", "domain", "errors"},
    "requests": {"requests", "domain", "errors", "metrics"},
    "duties": {"duties", "domain", "errors", "metrics"},
    "rpc": {"rpc", "requests", "domain", "errors", "config", "metrics"},
}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name for name in names if name}
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_one_way(room: str) -> None:
    for path in (ROOT / "tmc_server" / room).rglob("*.py"):
        for name in _imports(path):
            if name.startswith("tmc_server."):
                assert name.split(".")[1] in ALLOWED[room], f"{path.relative_to(ROOT)} imports {name}"


def test_the_domain_is_pure() -> None:
    for path in (ROOT / "tmc_server" / "domain").glob("*.py"):
        assert not {n.split(".")[0] for n in _imports(path)} & {
            "time",
            "sqlalchemy",
            "grpc",
            "asyncio",
            "tmc_client",
            "random",
        }


def test_the_client_knows_nothing_of_the_server() -> None:
    for path in (ROOT / "tmc_client").rglob("*.py"):
        assert not any(name.startswith("tmc_server") for name in _imports(path)), path


def test_only_app_names_concrete_adapters() -> None:
    concrete = {"tmc_server.store.group_commit", "tmc_server.alerts.log", "tmc_server.store.engines"}
    concrete |= {"tmc_server.delivery.rabbitmq", "tmc_server.discovery.consul"}
    for path in (ROOT / "tmc_server").rglob("*.py"):
        if "app" not in path.parts and "store" not in path.parts:
            assert not _imports(path) & concrete, path


def test_every_rpc_has_a_right_and_every_right_an_rpc() -> None:
    methods = {f"{name}/{method.name}" for name, service in SERVICES.items() for method in service.methods}
    assert methods == set(RIGHTS)


def test_every_error_has_a_status_a_published_reason_and_a_client_class() -> None:
    reasons = {leaf.reason for leaf in errors.leaves()}
    assert set(errors.leaves()) == set(CODES)
    published = set(types_pb2.Reason.keys()) - {"REASON_UNSPECIFIED"}
    assert reasons == published == set(client_errors.BY_REASON)


def test_the_public_names_are_those_listed() -> None:
    assert sorted(tmc_client.__all__) == tmc_client.__all__
    assert all(getattr(tmc_client, name) is not None for name in tmc_client.__all__)


def test_importing_the_client_is_light() -> None:
    script = "import sys, tmc_client; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert not {"sqlalchemy", "pika", "pydantic", "tmc_server", "uvloop"} & set(loaded)


def test_the_states_page_draws_the_tables() -> None:
    page = (ROOT / "docs" / "states.md").read_text()
    for table in (message.ARROWS, consumption.ARROWS):
        for (source, event), arrow in table.items():
            left = source.name if source is not None else "[*]"
            assert f"{left} --> {arrow.to.name}: {arrow.letter}" in page
            assert f"| {arrow.letter} | {event.value} |" in page
    drawn = re.findall(r"^\s*(\S+) --> (\S+): ([a-z])$", page, re.M)
    assert len(drawn) == len(message.ARROWS) + len(consumption.ARROWS)


def test_the_errors_page_lists_every_reason() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.M))
    assert listed == {leaf.reason: CODES[leaf].name for leaf in errors.leaves()}


def test_the_configuration_page_lists_every_key_with_its_default() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| `([^`]*)` \|", page, re.M)
    expected = [
        (section, key, _shown(getattr(getattr(Config(), section), key)))
        for section, field in Config.model_fields.items()
        for key in type(getattr(Config(), section)).model_fields
    ]
    assert rows == expected


def test_the_pipeline_page_lists_every_key_with_its_default_and_meaning() -> None:
    page = (ROOT / "docs" / "pipeline.md").read_text()
    settings = Settings()
    expected = [
        (f"{section}.{key}", _shown(getattr(part, key)), field.description)
        for section in ("spark", "archive", "reconcile", "report", "metrics")
        for part in (getattr(settings, section),)
        for key, field in type(part).model_fields.items()
    ]
    assert re.findall(r"^\| `(\w+\.\w+)` \| `([^`]*)` \| (.*) \|$", page, re.M) == expected


def test_the_pipeline_stands_on_the_domain_and_nobody_on_the_pipeline() -> None:
    for path in (ROOT / "tmc_pipeline").rglob("*.py"):
        for name in _imports(path):
            if name.startswith("tmc_server."):
                assert name.split(".")[1] in {"domain", "config", "settings"}, f"{path.name} imports {name}"
    for package in ("tmc_client", "tmc_server"):
        for path in (ROOT / package).rglob("*.py"):
            assert not any(name.startswith("tmc_pipeline") for name in _imports(path)), path


HEAVY = {
    "sqlalchemy",
    "alembic",
    "pydantic",
    "structlog",
    "aiohttp",
    "rich",
    "pygments",
    "pyspark",
    "matplotlib",
    "jinja2",
}
COSTS = {
    ("--help",): HEAVY | {"grpc", "typer", "click", "tmc_client", "google"},
    ("health", "127.0.0.1:1"): HEAVY | {"typer", "click", "tmc_client", "google"},
    ("admin", "--address", "127.0.0.1:1", "list-apps"): HEAVY - {"pydantic"}
    | {"prometheus_client"},  # typer needs pydantic
    ("consume", "--help"): HEAVY | {"typer", "click", "prometheus_client"},
    ("serve", "--help"): {"pyspark", "matplotlib", "jinja2"},
}


@pytest.mark.parametrize("arguments", COSTS)
def test_a_command_imports_only_what_it_needs(arguments: tuple[str, ...]) -> None:
    script = (
        "import atexit, sys; from tmc_server.cli import main; sys.argv = ['tmc', *sys.argv[1:]]\n"
        "atexit.register(lambda: print('loaded:', *{name.split('.')[0] for name in sys.modules}))\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    loaded = done.stdout.rpartition("loaded:")[2].split()
    assert "sys" in loaded, done.stderr
    assert sorted(COSTS[arguments] & set(loaded)) == []


def _shown(value: object) -> str:
    if hasattr(value, "get_secret_value"):
        return str(value.get_secret_value())
    return "" if value in (None, (), {}) else f"{value}"


def test_every_field_of_the_protos_is_commented() -> None:
    field = re.compile(r"(optional |repeated )?[\w.<>, ]+ [a-z_]+ = \d+;")
    for path in (ROOT / "protos" / "tmc" / "v1").glob("*.proto"):
        before = ""
        for line in map(str.strip, path.read_text().splitlines()):
            if field.match(line):
                assert before.startswith("//"), f"{path.name}: {line}"
            before = line


# Built from rows of the database, or to be reshaped with the operations (design section 5); each is named where it is made.
_BY_POSITION = {
    "ids.MessageId",
    "consumption.Row",
    "operations.Operation",
    "operations.Prepare",
    "operations.Decide",
    "operations.Nack",
    "messages._Holder",
    "messages._Submitted",
    "tables.ShardTables",
    "transaction.Transaction",
}


def test_records_with_more_than_three_fields_are_built_by_keyword() -> None:
    """Two strings that change places pass every type checker: an app's alert e-mail and its phone, say."""
    by_position = set()
    for package in ("tmc_client", "tmc_server", "tmc_pipeline"):
        for path in (ROOT / package).rglob("*.py"):
            for made in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
                options = [ast.unparse(each) for each in made.decorator_list if "dataclass" in ast.unparse(each)]
                fields = [each for each in made.body if isinstance(each, ast.AnnAssign)]
                if options and len(fields) > 3 and "kw_only=True" not in options[0]:
                    by_position.add(f"{path.stem}.{made.name}")
    assert by_position == _BY_POSITION


def test_an_apps_alert_addresses_cannot_change_places() -> None:
    by_position = [1, "orders", "orders", "orders", "orders@example.org", "+49 30 1234", (), "TOKEN"]
    make: Any = App
    with pytest.raises(TypeError, match="positional"):
        make(*by_position)
