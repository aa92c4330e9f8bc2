"""Marked secrets go into every setting and every way to fail; no output may hold them. Files are the user's alone."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

import tmc_client as tmc
from tests.support.cluster import TMC
from tmc_client.discovery import ConsulAddress
from tmc_server.config import Config, ConfigError, load
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

MARK = "Hunter2Marked"
SHAPES = [
    MARK,
    f"amqp://center:{MARK}/x@127.0.0.1:1/%2F",
    f"amqp://center:{MARK}#x@127.0.0.1:1/%2F",
    f"amqp://center:{MARK}?x@127.0.0.1:1/%2F",
    f"amqp://center:{MARK}[x@127.0.0.1:1/%2F",
    f"amqp://center:{MARK}@127.0.0.1:1/%2F?heartbeat={MARK}",
    f"amqp://center:{MARK}@127.0.0.1:1/%2F",
    f"amqp://{MARK}@127.0.0.1:1",
    f"amqpx://center:{MARK}@h",
    f"mariadb+mysqldb://u:{MARK}@127.0.0.1:{MARK}/db",
    f"mariadb+mysqldb://u:{MARK}/y@127.0.0.1:1/db",
    f"{MARK}://u:p@127.0.0.1/db",
    f"http://u:{MARK}@127.0.0.1:1/hook?token={MARK}",
    f"ftp://{MARK}",
    f'["{MARK}"]',
    f'["{MARK}"',
    f'{{"url": "mariadb://a:{MARK}@b/c", "first": "{MARK}"}}',
    f'[{{"url": "mariadb://a:{MARK}@b/c", "first": 0, "last": 99}}]',
]


def _settings() -> list[str]:
    """section.key of every setting there is: a new one is covered by itself."""
    return [
        f"{section}.{key}" for section in Config.model_fields for key in type(getattr(Config(), section)).model_fields
    ]


def _secrets() -> list[str]:
    config = Config()
    return [
        name
        for name in _settings()
        if isinstance(getattr(getattr(config, name.partition(".")[0]), name.partition(".")[2]), SecretStr)
    ]


def _variable(setting: str) -> str:
    return f"TMC_{setting.replace('.', '__').upper()}"


@pytest.mark.parametrize("setting", _settings())
def test_what_reading_the_configuration_says_never_quotes_a_value(setting: str) -> None:
    is_secret = setting in _secrets() or setting.startswith("store.")
    for shape in SHAPES:
        try:
            loaded = repr(load(None, {_variable(setting): shape}))
            shown = loaded if is_secret else ""  # others are plain texts, shown as such
        except ConfigError as exc:
            shown = str(exc)
        assert MARK not in shown


@pytest.mark.parametrize("setting", _secrets())
def test_a_secret_is_masked_in_every_form_of_the_configuration(setting: str) -> None:
    shapes = {
        "store.catalog": SHAPES[10].replace("/y", ""),
        "rabbitmq.url": SHAPES[6],
        "rabbitmq.management": f"http://center:{MARK}@127.0.0.1:15672",
        "alerts.webhook": SHAPES[12],
    }
    config = load(None, {_variable(setting): shapes.get(setting, MARK)})
    assert MARK not in f"{config} {config!r} {config.model_dump()} {config.model_dump_json()}"


def _run(folder: Path, arguments: str, until: str = "", **settings: str) -> str:
    """Everything that the command writes. until: a server that has written this is stopped."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TMC_")}
    own = {"TMC_STORE__CATALOG": f"sqlite:///{folder}/t.db", "TMC_SERVER__LISTEN": "127.0.0.1:0"}
    output = folder / "output"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [TMC, *arguments.split()], stdout=stream, stderr=stream, cwd=folder, env=clean | own | settings
        )
    if until:
        eventually(lambda: until in output.read_text() or process.poll() is not None, seconds=60)
        process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert until in output.read_text()
    return output.read_text()


FAILURES = [
    ("serve", "serving on port", {"TMC_RABBITMQ__URL": SHAPES[6], "TMC_DELIVERY__KIND": "rabbitmq"}),
    (
        "serve",
        "registration fails",
        {"TMC_CONSUL__AGENT": "127.0.0.1:1", "TMC_CONSUL__TOKEN": MARK, "TMC_DISCOVERY__KIND": "consul"},
    ),
    *(
        (command, until, {"TMC_STORE__CATALOG": f"{scheme}://u:{MARK}@127.0.0.1:1/db{options}"})
        for scheme in ("mariadb+mysqldb", "postgresql")
        for command, until, options in (
            ("serve", "waiting for", ""),
            ("doctor", "", ""),
            ("init", "", f"?{MARK}={MARK}"),
        )
    ),
    ("consume no_such:thing", "", {"TMC_BROKER_PASSWORD": MARK}),
    ("consume no_such:thing", "", {"TMC_STORE__CATALOG": f"x:{MARK}"}),
    ("admin list-apps", "", {"TMC_ADMIN_TOKEN": MARK, "TMC_ADDRESS": "127.0.0.1:1"}),
    ("admin list-apps", "", {"TMC_ADMIN_TOKEN": MARK, "TMC_ADDRESS": "center.example:1"}),
    ("admin --help", "", {"TMC_ADMIN_TOKEN": MARK}),
]


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize(("command", "until", "settings"), FAILURES)
def test_no_way_to_fail_shows_a_secret(
    tmp_path: Path, form: str, command: str, until: str, settings: dict[str, str]
) -> None:
    if until and "TMC_STORE__CATALOG" not in settings:
        _run(tmp_path, "init")
    output = _run(tmp_path, command, until, TMC_LOG__FORMAT=form, **settings)
    assert output
    assert MARK not in output


@pytest.mark.parametrize(
    "line", [f'catalog = "x:{MARK}"y"', f'catalog = ["{MARK}"]', f'catalog = {{ a = "{MARK}" }}', MARK]
)
def test_a_broken_file_is_not_quoted(tmp_path: Path, line: str) -> None:
    (tmp_path / "tmc.toml").write_text(f"[store]\n{line}\n")
    output = _run(tmp_path, f"serve -c {tmp_path}/tmc.toml")
    assert output
    assert MARK not in output


def test_a_token_for_consul_shows_nowhere() -> None:
    center = tmc.connect(f"consul://127.0.0.1:1/tmc?tag=prod&token={MARK}", app="a", key=MARK)
    shown = [repr(each) for each in (center, center.connection, center.identity)]
    shown.append(repr(ConsulAddress.parse(f"consul://h:1/s?token={MARK}")))
    assert "tag=prod" in shown[0]
    for wrong in (
        f"consul://h:1/s?token={MARK}&x=1",
        f"consul://h:{MARK}/s?token={MARK}",
        f"consuls://h/s?token={MARK}",
    ):
        with pytest.raises(ValueError, match="give") as caught:
            tmc.connect(wrong, app="a")
        assert caught.value.__cause__ is None
        shown.append(str(caught.value))
    assert MARK not in " ".join(shown)


def _modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.name != "log"}


@pytest.mark.parametrize("command", [["serve"], ["dev", "--port", "0", "--data", "t.db"]], ids=["serve", "dev"])
def test_files_of_the_center_are_its_users_alone(tmp_path: Path, command: list[str]) -> None:
    environment = os.environ | {
        "TMC_STORE__CATALOG": f"sqlite:///{tmp_path}/t.db",
        "TMC_SERVER__LISTEN": f"127.0.0.1:{free_port()}",
    }
    if command == ["serve"]:
        subprocess.run([TMC, "init"], env=environment, check=True, capture_output=True, umask=0o022)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([TMC, *command], env=environment, cwd=tmp_path, stderr=log, umask=0o022)
    try:
        eventually(lambda: "serving on port" in (tmp_path / "log").read_text(), seconds=60)
        modes = _modes(tmp_path)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert {"t.db", "t.db-wal", "t.db-shm", "t.db.lock"} <= set(modes)
    assert set(modes.values()) == {0o600}


def test_a_logged_failure_shows_no_variables_of_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    from tmc_server.config import LogConfig
    from tmc_server.telemetry import configure_logging

    stream: Any = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        for form in ("json", "text"):
            configure_logging(LogConfig.model_validate({"format": form}))
            _fail_with(json.dumps({"password": MARK}))
    finally:
        root.handlers[:], root.level = before
    assert stream.getvalue().count("it failed") == 2
    assert MARK not in stream.getvalue()


def _fail_with(secret: str) -> None:
    try:
        raise ValueError(len(secret))
    except ValueError:
        logging.getLogger("tmc.test").exception("it failed")
