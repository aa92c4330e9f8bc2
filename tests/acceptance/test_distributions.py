"""Both distributions as strangers get them: built from their source archives, installed into empty environments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import ROOT
from tests.support.dose import LONG

pytestmark = pytest.mark.services
Run = Callable[..., subprocess.CompletedProcess[str]]

CLIENT = {"tmc_cli", "tmc_client", "tmc_common"}
CENTER = {"tmc_console", "tmc_pipeline", "tmc_pytest", "tmc_server", "tmc_storm"}
_CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("TMC_", "PYTHON"))}
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By distribution; each is built from the source archive that is built first."""
    folder = tmp_path_factory.mktemp("wheels")
    for project in (ROOT / "clients" / "python", ROOT):
        command = [sys.executable, "-m", "build", "--outdir", str(folder), str(project)]
        subprocess.run(command, check=True, capture_output=True, env=_CLEAN)
    return {name: next(folder.glob(f"{name.replace('-', '_')}-*.whl")) for name in ("tmc-client", "tmc-center")}


def _installed(folder: Path, *requirements: str) -> Path:
    """Make an environment without pip. Returns its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    programs = folder / "venv" / "bin"
    command = [*_PIP, "--python", str(programs / "python"), "install", "--no-compile", *requirements]
    subprocess.run(command, check=True, env=_CLEAN)
    return programs


def _contents(wheel: Path) -> set[str]:
    return {path for path in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in path}


@pytest.fixture(scope="module")
def alone(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs `tmc` where only the client is installed, without extras."""
    folder = tmp_path_factory.mktemp("alone")
    programs = _installed(folder, str(wheels["tmc-client"]))
    (folder / "shop.py").write_text(
        "import sys\nimport tmc_client as tmc\n"
        "class Ends(tmc.Consumer):\n"
        "    def run(self):\n"
        "        print('it runs')\n"
        "consumer = Ends(tmc.connect('127.0.0.1:1', app='coupons'))\n"
    )

    def run(*arguments: str, program: str = "tmc") -> subprocess.CompletedProcess[str]:
        command = [str(programs / program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=_CLEAN, cwd=folder)

    yield run
    shutil.rmtree(folder)


def test_each_file_is_in_one_distribution(wheels: dict[str, Path]) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    for name, packages in {"tmc-client": CLIENT, "tmc-center": CENTER}.items():
        files = {path for path in listed if path.split("/")[0] in packages and (ROOT / path).exists()}
        protos = {f"tmc_common/{path}" for path in listed if path.startswith("protos/") and name == "tmc-client"}
        assert _contents(wheels[name]) == files | protos
        assert wheels[name].stat().st_size < 1_000_000


def test_the_image_copies_what_the_wheels_are_built_of(wheels: dict[str, Path], tmp_path: Path) -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) (\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    for sources, target in copied:
        for source in map(ROOT.joinpath, sources.split()):
            if source.is_dir():
                shutil.copytree(source, tmp_path / target)
            else:
                shutil.copy(source, tmp_path)
    version = {"SETUPTOOLS_SCM_PRETEND_VERSION": "0.1.0.dev0"}  # as there: it has no history
    command = [*_PIP, "wheel", "--no-deps", "-w", str(tmp_path / "wheels"), "./clients/python", "."]
    subprocess.run(command, check=True, cwd=tmp_path, env=_CLEAN | version)
    for wheel in (tmp_path / "wheels").iterdir():
        name, built, *_ = wheel.name.split("-")
        assert built == "0.1.0.dev0"
        assert _contents(wheel) == _contents(wheels[name.replace("_", "-")])


def test_the_index_would_take_them(wheels: dict[str, Path]) -> None:
    archives = sorted(str(path) for path in wheels["tmc-client"].parent.iterdir())
    assert len(archives) == 4
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *archives], check=True, capture_output=True)
    assert (ROOT / "clients/python/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_center_needs_the_client_of_its_version(wheels: dict[str, Path]) -> None:
    versions = {name: path.name.split("-")[1] for name, path in wheels.items()}
    assert versions["tmc-client"] == versions["tmc-center"]
    metadata = zipfile.ZipFile(wheels["tmc-center"])
    (path,) = (each for each in metadata.namelist() if each.endswith(".dist-info/METADATA"))
    needed = re.findall(r"^Requires-Dist: (tmc-client==\S+)$", metadata.read(path).decode(), re.M)
    assert needed == [f"tmc-client=={versions['tmc-client']}"]


def test_the_client_alone_is_six_packages(alone: Run) -> None:
    names = "import importlib.metadata as m; print(*sorted(d.name for d in m.distributions()))"
    installed = alone("-c", names, program="python").stdout.split()
    assert "tmc-client" in installed
    assert len(installed) <= 6


def test_help_and_the_clients_commands_work(alone: Run) -> None:
    for arguments in (["--help"], ["consume", "--help"], ["health", "--help"]):
        done = alone(*arguments)
        assert (done.returncode, done.stdout[:6].lower(), done.stderr) == (0, "usage:", "")
    assert alone("health", "127.0.0.1:1").stderr.startswith("Nobody listens on 127.0.0.1:1")
    assert alone("consume", "shop:consumer").stdout == "it runs\n"


def test_the_version_is_that_of_the_distribution(alone: Run, wheels: dict[str, Path]) -> None:
    version = wheels["tmc-client"].name.split("-")[1]
    done = alone("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tmc {version}\n", "")
    assert alone("-c", "import tmc_client; print(tmc_client.__version__)", program="python").stdout == f"{version}\n"


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("serve", "tmc-center[server]"),
        ("dev", "tmc-center[server]"),
        ("init", "tmc-center[server]"),
        ("doctor", "tmc-center[server]"),
        ("admin", "tmc-center[server]"),
        ("console", "tmc-center[console]"),
        ("storm", "tmc-center[storm]"),
        ("pipeline", "tmc-center[pipeline]"),
        ("outbox", "tmc-client[outbox]"),
    ],
)
def test_a_command_that_needs_more_says_what_to_install(alone: Run, command: str, extra: str) -> None:
    done = alone(command)
    assert done.returncode == 2
    assert done.stderr.startswith(f"tmc {command} needs {'the center,' if 'center' in extra else 'sqlalchemy,'} ")
    assert done.stderr.endswith(f"which is not installed: pip install '{extra}'.\n")
    assert done.stderr.count("\n") == 1


_PUBLISHES = """
import tmc_client as tmc
with tmc.connect("embedded+sqlite:///center.db", app="orders") as center:
    print(center.publish("order.paid", {"order": 1}, key="paid-1") != "")
"""
_OUTBOX = """
import sqlalchemy as sa
from sqlalchemy.orm import Session
import tmc_client as tmc
engine = sa.create_engine("sqlite:///shop.db")
tmc.create_tables(engine)
outbox = tmc.Outbox(engine, tmc.connect("127.0.0.1:1", app="orders"))
with Session(engine) as session, session.begin():
    outbox.add(session, "order.paid", {"order": 1}, key="paid-1")
with engine.connect() as connection:
    print(connection.scalar(sa.text("SELECT count(*) FROM tmc_outbox")) == 1)
"""
_TARGET = """
import sqlalchemy as sa
import tmc_client as tmc
print(tmc.Outbox(sa.create_engine("sqlite://"), "%s://127.0.0.1:1") is not None)
"""
_DJANGO = """
import django
from django.conf import settings
engine = "django.db.backends.sqlite3"
database = {"ENGINE": engine, "NAME": "shop.db", "OPTIONS": {"transaction_mode": "IMMEDIATE"}}
center = {"ADDRESS": "127.0.0.1:1", "APP": "orders"}
settings.configure(INSTALLED_APPS=["tmc_client.django"], DATABASES={"default": database}, TMC=center)
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
call_command("check", fail_level="WARNING", stdout=open("checked", "w"))
print(True)
"""
_CONSUL = """
import tmc_client as tmc
with tmc.connect("consul://127.0.0.1:1/tmc", app="orders") as center:
    try:
        center.publish("order.paid", b"", key="paid-1")
    except tmc.Unavailable:
        print(True)
"""
_CONSOLE = """
from tmc_console.running import ConsoleConfig
print(ConsoleConfig is not None)
"""
# Requirement -> a program that prints True, and a command whose --help works. Large ones only by --long.
FIRST_CALLS = {
    "tmc-client[outbox]": (_OUTBOX, "outbox"),
    "tmc-client[django]": (_DJANGO, "outbox"),
    "tmc-client[outbox,rabbitmq]": (_TARGET % "amqp", "outbox"),
    "tmc-client[outbox,kafka]": (_TARGET % "kafka", "outbox"),
    "tmc-client[consul]": (_CONSUL, "consume"),
    "tmc-center[server]": (_PUBLISHES, "serve"),
    "tmc-center[console]": (_CONSOLE, "console"),
}
LARGE = {
    "tmc-center[storm]": (_PUBLISHES, "storm"),
    "tmc-center[server,console,http,oidc,s3,postgresql,rabbitmq,consul,kafka]": (_PUBLISHES, "serve"),
    "tmc-center[pipeline]": (_PUBLISHES, "pipeline"),
}


ALWAYS = ("tmc-client[outbox]", "tmc-center[server]")
_IN_TURN = pytest.mark.takes_turns("extras")


@pytest.mark.parametrize(
    "requirement",
    [
        *ALWAYS,
        *(pytest.param(extra, marks=_IN_TURN) for extra in FIRST_CALLS if extra not in ALWAYS),
        *(LARGE if LONG else {}),
    ],
)
def test_an_extra_brings_what_it_needs(wheels: dict[str, Path], tmp_path: Path, requirement: str) -> None:
    _first_call(wheels, tmp_path, requirement)


@pytest.mark.parametrize("requirement", FIRST_CALLS if LONG else ["tmc-center[server]"])
def test_the_lowest_versions_do_as_well(wheels: dict[str, Path], tmp_path: Path, requirement: str) -> None:
    lowest = tmp_path / "lowest.txt"
    extras = "server,console,http,rabbitmq,consul,kafka"
    command = [sys.executable, str(ROOT / "scripts/lowest.py"), extras]
    lowest.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    _first_call(wheels, tmp_path, requirement, "--constraint", str(lowest))


def _first_call(wheels: dict[str, Path], tmp_path: Path, requirement: str, *options: str) -> None:
    """Install a requirement into an empty environment; run its program, and the help of its command."""
    program, command = (FIRST_CALLS | LARGE)[requirement]
    name, _, extras = requirement.partition("[")
    programs = _installed(tmp_path, *options, *{str(wheels["tmc-client"]), f"{wheels[name]}[{extras}"})
    called = subprocess.run(
        [programs / "python", "-c", program], cwd=tmp_path, env=_CLEAN, capture_output=True, text=True
    )
    assert (called.stdout, called.returncode) == ("True\n", 0), called.stderr
    asked = subprocess.run(
        [programs / "tmc", command, "--help"], cwd=tmp_path, env=_CLEAN, capture_output=True, text=True
    )
    assert asked.stdout.strip().lower().startswith("usage:"), asked.stderr
