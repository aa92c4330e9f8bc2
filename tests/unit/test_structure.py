"""The house: who may import whom, what is exported, what the docs say about the tables."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import IntEnum
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import tmc_client
from tmc_client import errors as client_errors
from tmc_common.protocol import admin_pb2, types_pb2
from tmc_pipeline.settings import Settings
from tmc_server import errors
from tmc_server.config import Config
from tmc_server.domain import consumption, message
from tmc_server.domain.catalog import App, QueueMode
from tmc_server.domain.checks import Verdict
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.retry import RetryKind
from tmc_server.domain.rights import RIGHTS
from tmc_server.requests.explanations import Why
from tmc_server.rpc.server import SERVICES
from tmc_server.rpc.status import CODES

ROOT = Path(__file__).parents[2]

PACKAGES = (
    "tmc_common",
    "tmc_client",
    "tmc_server",
    "tmc_console",
    "tmc_cli",
    "tmc_pipeline",
    "tmc_pytest",
    "tmc_storm",
)

# Package -> other packages that it may import. Whatever is not listed is forbidden; a new package is red until it is listed.
_SERVER = {"tmc_server.domain", "tmc_server.errors", "tmc_common.eventlog", "tmc_common.tracing", "tmc_common.limited"}
ALLOWED = {
    "tmc_common": set(),
    "tmc_client": {"tmc_common"},
    "tmc_server": set(),
    "tmc_server.errors": set(),
    "tmc_server.settings": set(),
    "tmc_server.origin": set(),
    "tmc_server.domain": {"tmc_server.errors", "tmc_common.addresses", "tmc_common.headers"},
    "tmc_server.config": {"tmc_server.settings", "tmc_server.domain", "tmc_common.addresses", "tmc_common.fields"},
    "tmc_server.metrics": {"tmc_server.domain"},
    "tmc_server.telemetry": {
        "tmc_server.config",
        "tmc_server.metrics",
        "tmc_common.printable",
        "tmc_common.addresses",
        "tmc_common.eventlog",
    },
    "tmc_server.outgoing": {"tmc_server.domain"},
    "tmc_server.certificates": {"tmc_server.config", "tmc_server.metrics", "tmc_common.eventlog"},
    "tmc_server.requests": {
        *_SERVER,
        "tmc_server.metrics",
        "tmc_server.origin",
        "tmc_common.addresses",
        "tmc_common.fields",
        "tmc_common.headers",
        "tmc_common.submission",
    },
    "tmc_server.duties": {*_SERVER, "tmc_server.metrics"},
    "tmc_server.rpc": {
        *_SERVER,
        "tmc_server.requests",
        "tmc_server.certificates",
        "tmc_server.config",
        "tmc_server.metrics",
        "tmc_server.origin",
        "tmc_server.settings",
        "tmc_common.headers",
        "tmc_common.protocol",
        "tmc_common.submission",
    },
    "tmc_server.http": {
        *_SERVER,
        "tmc_server.certificates",
        "tmc_server.config",
        "tmc_server.rpc",
        "tmc_common.addresses",
        "tmc_common.http_connections",
    },
    "tmc_server.submission": {
        *_SERVER,
        "tmc_server.requests",
        "tmc_server.rpc.status",
        "tmc_server.metrics",
        "tmc_common.amqp",
        "tmc_common.cloud_events",
        "tmc_common.headers",
        "tmc_common.kafka",
        "tmc_common.signatures",
        "tmc_common.submission",
    },
    # Adapters know the domain's ports and nothing of each other; no package but app knows an adapter.
    "tmc_server.store": {
        *_SERVER,
        "tmc_server.metrics",
        "tmc_server.origin",
        "tmc_common.clocks",
        "tmc_common.headers",
    },
    "tmc_server.delivery": {
        *_SERVER,
        "tmc_server.outgoing",
        "tmc_server.metrics",
        "tmc_common.amqp",
        "tmc_common.cloud_events",
        "tmc_common.headers",
        "tmc_common.kafka",
        "tmc_common.mismatch",
        "tmc_common.signatures",
    },
    "tmc_server.discovery": {*_SERVER, "tmc_common.consul"},
    "tmc_server.checks": {*_SERVER, "tmc_server.outgoing", "tmc_common.protocol", "tmc_common.mismatch"},
    "tmc_server.alerts": {*_SERVER, "tmc_server.outgoing", "tmc_common.printable"},
    "tmc_server.archives": _SERVER,
    "tmc_server.identity": _SERVER,
}
ALLOWED["tmc_server.app"] = {"tmc_common", *ALLOWED} - {"tmc_client"}
ALLOWED["tmc_cli"] = {
    "tmc_common",
    "tmc_client",
    "tmc_console.running",
    "tmc_console.sso_names",
    "tmc_server.app",
    "tmc_server.config",
    "tmc_server.telemetry",
    "tmc_storm",
}
ALLOWED["tmc_console"] = {
    "tmc_common.admin_calls",
    "tmc_common.http_connections",
    "tmc_common.limited",
    "tmc_common.addresses",
    "tmc_common.enums",
    "tmc_common.protocol",
    "tmc_common.proxies",
    "tmc_common.spreadsheets",
}
ALLOWED["tmc_pytest"] = {"tmc_client"}
# It judges the center from outside: it must not know the server.
ALLOWED["tmc_storm"] = {
    "tmc_client",
    "tmc_common.admin_calls",
    "tmc_common.addresses",
    "tmc_common.amqp",
    "tmc_common.protocol",
}
ALLOWED["tmc_pipeline"] = {
    "tmc_common.clocks",
    "tmc_client",
    "tmc_common.headers",
    "tmc_common.spreadsheets",
    "tmc_server.config",
    "tmc_server.domain",
    "tmc_server.settings",
}

# Library -> packages that may import it.
LIBRARIES = {
    "alembic": {"tmc_server.store"},
    "confluent_kafka": {"tmc_client", "tmc_common", "tmc_server.delivery", "tmc_server.submission"},
    "consul": {"tmc_common", "tmc_client", "tmc_server.discovery"},
    "django": {"tmc_client"},
    "fsspec": {"tmc_server.archives"},
    "google": {
        "tmc_common",
        "tmc_client",
        "tmc_cli",
        "tmc_console",
        "tmc_server.checks",
        "tmc_server.http",
        "tmc_server.rpc",
        "tmc_server.submission",
    },
    "grpc": {
        "tmc_common",
        "tmc_client",
        "tmc_cli",
        "tmc_console",
        "tmc_server.app",
        "tmc_server.checks",
        "tmc_server.http",
        "tmc_server.rpc",
        "tmc_storm",
    },
    "grpc_health": {"tmc_server.rpc"},
    "grpc_reflection": {"tmc_server.checks", "tmc_server.rpc"},
    "h11": {"tmc_common"},
    "httpcore": {"tmc_server.outgoing"},
    "httpx": {
        "tmc_common",
        "tmc_console",
        "tmc_server.alerts",
        "tmc_server.app",
        "tmc_server.checks",
        "tmc_server.delivery",
        "tmc_server.identity",
        "tmc_server.outgoing",
        "tmc_storm",
    },
    "joserfc": {"tmc_server.identity"},
    "jinja2": {"tmc_console", "tmc_pipeline", "tmc_storm"},
    "markupsafe": {"tmc_console"},
    "starlette": {"tmc_console"},
    "uvicorn": {"tmc_common", "tmc_console", "tmc_server.http", "tmc_storm"},
    "matplotlib": {"tmc_pipeline"},
    "msgspec": {"tmc_client", "tmc_server.delivery", "tmc_server.domain", "tmc_server.store"},
    "opentelemetry": {"tmc_common"},
    "pika": {
        "tmc_common",
        "tmc_client",
        "tmc_server.config",
        "tmc_server.delivery",
        "tmc_server.submission",
        "tmc_storm",
    },
    "prometheus_client": {
        "tmc_pipeline",
        "tmc_server.duties",
        "tmc_server.metrics",
        "tmc_server.rpc",
        "tmc_server.telemetry",
    },
    "py4j": {"tmc_pipeline"},
    "pydantic": {"tmc_client", "tmc_pipeline", "tmc_server.config", "tmc_server.settings"},
    "pyspark": {"tmc_pipeline"},
    "pytest": {"tmc_pytest"},
    "requests": {"tmc_common", "tmc_client", "tmc_server.discovery"},
    "psycopg": {"tmc_server.store"},
    "sqlalchemy": {
        "tmc_client",
        "tmc_pipeline",
        "tmc_server.app",
        "tmc_server.config",
        "tmc_server.store",
        "tmc_storm",
    },
    "structlog": {"tmc_server.telemetry"},
    "typer": {"tmc_cli", "tmc_pipeline"},
    "uvloop": {"tmc_server.app", "tmc_server.checks", "tmc_server.delivery"},
}


def _modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if "migrations" not in path.parts:
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


def _room(module: str) -> str:
    """The server's folders and modules are packages of their own, the other packages are one package each."""
    return ".".join(module.split(".")[: 2 if module.startswith("tmc_server.") else 1])


def _imports(path: Path) -> set[str]:
    """Modules by their full names; what is imported from a package by its own, since it may be a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in PACKAGES:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(str(node.module))
    return found


def test_every_room_is_listed() -> None:
    assert {_room(module) for module, _ in _modules()} == set(ALLOWED)


@pytest.mark.parametrize("package", ALLOWED)
def test_a_room_imports_only_what_is_listed(package: str) -> None:
    forbidden = {
        f"{module} imports {name}"
        for module, path in _modules()
        if _room(module) == package
        for name in _imports(path)
        if name.split(".")[0] in PACKAGES and _room(name) != package
        if not any(f"{name}.".startswith(f"{allowed}.") for allowed in ALLOWED[package])
    }
    assert forbidden == set()


def test_libraries_stay_in_their_rooms() -> None:
    used: dict[str, set[str]] = {}
    for module, path in _modules():
        for name in _imports(path):
            library = name.split(".")[0]
            if library not in PACKAGES and library not in sys.stdlib_module_names:
                used.setdefault(library, set()).add(_room(module))
    assert used == LIBRARIES


_ROOMS_OF_THE_CLIENT = {
    "connecting": set(),
    "local": set(),
    "producing": {"connecting", "local"},
    "consuming": {"connecting", "local"},
    "checks": {"connecting", "local", "producing"},
    "outbox": {"connecting", "local", "producing"},
}


@pytest.mark.parametrize("room", _ROOMS_OF_THE_CLIENT)
def test_rooms_of_the_client_import_downward(room: str) -> None:
    """At import time, also through others. Beside the rooms is what all need (errors, tables, ...), and the faces above."""
    modules = dict(_modules())
    waiting = [module for module in modules if module.startswith(f"tmc_client.{room}.")]
    reached: set[str] = set()
    while waiting:
        module = waiting.pop()
        new = {name for name in _imported_at_once(modules[module], modules) if name.startswith("tmc_client.")} - reached
        reached |= new
        waiting += [name for name in new if name in modules]
    rooms = {name.split(".")[1] for name in reached}
    below = {room, *_ROOMS_OF_THE_CLIENT[room]}
    assert rooms & set(_ROOMS_OF_THE_CLIENT) <= below
    assert not rooms & {"center", "aio", "testing", "django"}


def test_no_two_modules_import_each_other() -> None:
    """Directly or through others, at import time; what a function imports when it runs is no cycle."""
    modules = dict(_modules())
    edges = {module: set(_imported_at_once(path, modules)) for module, path in modules.items()}
    TopologicalSorter(edges).prepare()  # raises CycleError


def _imported_at_once(path: Path, modules: Collection[str]) -> Iterator[str]:
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else str(node.module) for name in names)


# Pure values: no clock, no I/O, no randomness. threading: a lock around the numbers that are given out.
_OF_THE_DOMAIN = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "ipaddress",
    "json",
    "msgspec",  # records of the hot path
    "re",
    "threading",
    "typing",
    "zlib",
}


def test_the_domain_is_pure() -> None:
    for module, path in _modules():
        if _room(module) == "tmc_server.domain":
            used = {name.split(".")[0] for name in _imports(path)}
            assert used <= _OF_THE_DOMAIN | {"tmc_server", "tmc_common"}, module


@pytest.mark.parametrize("package", ["tmc_server.domain", "tmc_server.requests"])
def test_signatures_say_what_they_take(package: str) -> None:
    untyped = {
        f"{module}:{node.lineno}"
        for module, path in _modules()
        if _room(module) == package
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == "Any"
    }
    assert untyped == set()


def test_numbers_that_mean_different_things_have_different_types() -> None:
    """mypy then refuses a shard where a message number is expected. In domain.checks an attempt is the number of a check."""
    types = {"shard": "Shard", "subscription": "SubscriptionNumber", "attempt": "Attempt"}
    plain = {
        f"{module}:{node.lineno} {name}"
        for module, path in _modules()
        if module.startswith("tmc_server.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None
        for name in [node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)]
        if name in types and ast.unparse(node.annotation) == "int"
    }
    assert {each.rpartition(":")[0] for each in plain} == {"tmc_server.domain.checks"}, plain


def test_every_rpc_has_a_right_and_every_right_an_rpc() -> None:
    methods = {f"{name}/{method.name}" for name, service in SERVICES.items() for method in service.methods}
    assert methods == set(RIGHTS)


def test_every_error_has_a_status_a_published_reason_and_a_client_class() -> None:
    reasons = {leaf.reason for leaf in errors.leaves()}
    assert set(errors.leaves()) == set(CODES)
    published = set(types_pb2.Reason.keys()) - {"REASON_UNSPECIFIED"}
    assert reasons == published == set(client_errors.BY_REASON)


@pytest.mark.parametrize(
    ("ours", "published"),
    [
        (MessageState, types_pb2.MessageState),
        (ConsumptionState, types_pb2.ConsumptionState),
        (RetryKind, types_pb2.RetryKind),
        (QueueMode, types_pb2.QueueMode),
        (Verdict, types_pb2.Verdict),
        (tmc_client.Verdict, types_pb2.Verdict),
    ],
)
def test_enums_are_those_of_the_protos(ours: type[IntEnum], published: Any) -> None:
    """Names and numbers; zero is for what is not set."""
    prefix = published.DESCRIPTOR.values_by_number[0].name.removesuffix("UNSPECIFIED")
    names = {name.removeprefix(prefix): number for name, number in published.items() if number}
    assert {each.name: int(each) for each in ours} == names


def test_the_public_names_are_those_listed() -> None:
    assert sorted(tmc_client.__all__) == tmc_client.__all__
    assert all(getattr(tmc_client, name) is not None for name in tmc_client.__all__)


def test_importing_the_client_is_light() -> None:
    script = "import sys, tmc_client; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert not {"sqlalchemy", "pika", "pydantic", "tmc_server", "uvloop"} & set(loaded)


def test_the_states_page_draws_the_tables() -> None:
    page = (ROOT / "docs" / "states.md").read_text()
    for table in (message.TRANSITIONS, consumption.TRANSITIONS):
        for (source, event), transition in table.items():
            left = source.name if source is not None else "[*]"
            assert f"{left} --> {transition.to.name}: {transition.letter}" in page
            assert f"| {transition.letter} | {event.value} |" in page
    drawn = re.findall(r"^\s*(\S+) --> (\S+): ([a-z]+)$", page, re.M)
    assert len(drawn) == len(message.TRANSITIONS) + len(consumption.TRANSITIONS)


def test_the_page_on_waiting_lists_every_reason_and_remedy() -> None:
    page = (ROOT / "docs" / "why.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", page, re.M) == [(why.name, why.value) for why in Why]


def test_the_errors_page_lists_every_reason() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.M))
    assert listed == {leaf.reason: CODES[leaf].name for leaf in errors.leaves()}


def test_the_configuration_page_lists_every_key_with_its_default_and_meaning() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| `([^`]*)` \| (.*) \|$", page, re.M)
    expected = [
        (section, key, _shown(getattr(part, key)), field.description)
        for section in Config.model_fields
        for part in (getattr(Config(), section),)
        for key, field in type(part).model_fields.items()
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
        "import atexit, sys; from tmc_cli import main; sys.argv = ['tmc', *sys.argv[1:]]\n"
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


# Built from rows of the database; each is named where it is made.
_BY_POSITION = {
    "tmc_server.domain.consumption.Row",
    "tmc_server.domain.ids.MessageId",
    "tmc_server.store.transaction.Transaction",
}


@dataclass(frozen=True, kw_only=True)
class _Record:
    bases: tuple[str, ...]
    by_position: int  # fields of its own that are given by position


def _records() -> Iterator[tuple[str, str, _Record]]:
    """Module, name and fields of each dataclass, struct and named tuple."""
    for module, path in _modules():
        for made in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
            options = " ".join(ast.unparse(each) for each in [*made.decorator_list, *made.keywords])
            bases = tuple(ast.unparse(base) for base in made.bases)
            if "dataclass" in options or "frozen" in options or "NamedTuple" in bases:
                fields = [each for each in made.body if isinstance(each, ast.AnnAssign)]
                markers = [ast.unparse(each.annotation) for each in fields]
                fields = fields[: markers.index("KW_ONLY")] if "KW_ONLY" in markers else fields
                given = [each for each in fields if each.value is None or "init=False" not in ast.unparse(each.value)]
                yield (
                    module,
                    made.name,
                    _Record(bases=bases, by_position=0 if "kw_only=True" in options else len(given)),
                )


def test_records_with_more_than_three_fields_are_built_by_keyword() -> None:
    """Two strings that change places pass every type checker: an app's alert e-mail and its phone, say."""
    records = list(_records())
    by_name = {name: record for _, name, record in records}

    def by_position(record: _Record) -> int:
        return record.by_position + sum(by_position(by_name[base]) for base in record.bases if base in by_name)

    assert {f"{module}.{name}" for module, name, record in records if by_position(record) > 3} == _BY_POSITION


def test_no_object_is_made_of_six_values_in_a_row() -> None:
    by_position = {
        f"{module}:{node.lineno} {ast.unparse(node.func)}"
        for module, path in _modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and len(node.args) >= 6
        if ast.unparse(node.func).split(".")[-1][0].isupper() and ast.unparse(node.func) != "sa.Table"
        if "protocol" not in path.parts
    }
    assert by_position == set()


def test_an_apps_alert_addresses_cannot_change_places() -> None:
    by_position = [1, "orders", "orders", "orders", "orders@example.org", "+49 30 1234", (), "TOKEN"]
    make: Any = App
    with pytest.raises(TypeError, match="positional"):
        make(*by_position)


# Reads of private names by tests, each for what nothing public shows: what dies in the middle of a step (story, hung
# server), which plan Spark makes, frames of pika, forks and locks, copies of the catalog that are old on purpose.
_PRIVATE_READS = {
    "tests/acceptance/test_compose.py": 1,
    "tests/contract/store/test_catalog.py": 3,
    "tests/integration/server/test_askers.py": 1,
    "tests/integration/server/test_discovery.py": 3,
    "tests/integration/client/test_fence.py": 1,
    "tests/integration/server/test_group_commit.py": 1,
    "tests/integration/client/test_hung_server.py": 1,
    "tests/integration/server/test_kafka.py": 1,
    "tests/support/doors.py": 1,
    "tests/integration/server/test_rabbitmq_outlet.py": 1,
    "tests/integration/client/test_sdk.py": 6,
    "tests/integration/server/test_tls.py": 1,
    "tests/pipeline/test_archive.py": 2,
    "tests/pipeline/test_reconcile.py": 3,
    "tests/pipeline/test_report.py": 3,
    "tests/support/dev_services.py": 2,
    "tests/support/story/dying_producer.py": 3,
    "tests/unit/server/test_edge.py": 1,
    "tests/unit/server/test_pacing.py": 2,
    "tests/unit/client/test_patience.py": 2,
    "tests/unit/client/test_rabbit_copies.py": 9,
    "tests/unit/server/test_rabbit_queues.py": 1,
    "tests/unit/client/test_screening.py": 1,
    "tests/unit/client/test_sender.py": 2,
}
_PUBLIC_IN_SPITE_OF_THEIR_NAMES = {"_mapping", "_asdict", "_replace", "_exit", "_fields", "_getframe"}


def test_tests_and_benches_read_no_private_names() -> None:
    """A test that reads them is red after every change of the inside; what it needs to see is worth a public name."""
    found: dict[str, int] = {}
    for folder in ("tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            reads = [
                node
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
                and node.attr not in _PUBLIC_IN_SPITE_OF_THEIR_NAMES
                and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
                and not (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super")
            ]
            if reads:
                found[str(path.relative_to(ROOT))] = len(reads)
    assert found == _PRIVATE_READS


# Ports whose adapters all pass one contract suite.
_CONTRACTS = {
    "tmc_server/domain/ports/delivery.py::Outlet": "tests/contract/adapters/test_outlet.py",
    "tmc_server/domain/ports/checks.py::Asker": "tests/contract/adapters/test_asker.py",
    "tmc_server/domain/ports/checks.py::Instances": "tests/contract/adapters/test_instances.py",
    "tmc_server/domain/ports/alerts.py::AlertSink": "tests/contract/adapters/test_sink.py",
    "tmc_client/consuming/received.py::Transport": "tests/contract/adapters/test_transport.py",
}


def _methods(made: ast.ClassDef) -> set[str]:
    return {each.name for each in made.body if isinstance(each, ast.FunctionDef)} - {"__init__"}


def _classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("port", _CONTRACTS)
def test_every_adapter_of_a_port_passes_its_contract(port: str) -> None:
    """Adapters are found by their methods: one that is added without its contract is red."""
    source, _, name = port.partition("::")
    (protocol,) = [made for made in _classes(ROOT / source) if made.name == name]
    near = {"tmc_client/consuming/received.py": "tmc_client/consuming/transports"}.get(source, "tmc_server")
    adapters = {
        made.name
        for path in (ROOT / near).rglob("*.py")
        if "ports" not in path.parts
        for made in _classes(path)
        if _methods(protocol) <= _methods(made)
    }
    suite = (ROOT / _CONTRACTS[port]).read_text()
    assert adapters
    assert {adapter for adapter in adapters if adapter not in suite} == set()


def test_every_admin_rpc_has_a_command() -> None:
    commands = "".join(path.read_text() for path in (ROOT / "tmc_cli" / "admin").glob("*.py"))
    methods = [method.name for method in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods]
    assert [method for method in methods if f'"{method}"' not in commands] == []


def test_blocking_programs_need_no_greenlet() -> None:
    """SQLAlchemy's asyncio needs it, and its package does not bring it."""
    modules = "tmc_client.consuming.inbox, tmc_client.outbox, tmc_client.producing.transaction"
    code = f"import sys; sys.modules['greenlet'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
