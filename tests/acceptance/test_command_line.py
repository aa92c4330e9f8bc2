"""The `tmc` command as operators use it: init, doctor, serve with TLS, admin, a second server, two signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

import tmc_client as tmc
from tests.support.certificates import for_loopback
from tmc_server.store.migrate import head_revision
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

TMC = str(Path(sys.executable).parent / "tmc")
_SHORT = timedelta(seconds=1)


def _tmc(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TMC, *arguments], capture_output=True, text=True, timeout=60, env=os.environ | (environment or {})
    )


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    return {
        "TMC_SERVER__LISTEN": f"127.0.0.1:{free_port()}",
        "TMC_STORE__CATALOG": f"sqlite:///{tmp_path}/center.db",
        "TMC_STORE__CHANGE_DELAY_MS": "1500",
    }


def test_init_is_repeatable_and_shows_the_token_once(settings: dict[str, str]) -> None:
    first, second = _tmc("init", environment=settings), _tmc("init", environment=settings)
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(first.stdout.strip()) == 43
    assert first.stdout.strip() not in second.stdout + second.stderr


def test_doctor_and_serve_say_what_is_missing(settings: dict[str, str]) -> None:
    doctor, serve = _tmc("doctor", environment=settings), _tmc("serve", environment=settings)
    assert (doctor.returncode, serve.returncode) == (1, 2)
    for output in (doctor.stdout, serve.stderr):
        assert f"schema revision = none, must be {head_revision()}: run tmc init" in output
    assert "Traceback" not in serve.stderr
    _tmc("init", environment=settings)
    assert _tmc("doctor", environment=settings).returncode == 0


def test_mistakes_in_the_configuration_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[server]\nlistn = 'x'\n")
    done = _tmc("serve", "--config", str(tmp_path / "bad.toml"))
    assert done.returncode == 2
    assert "did you mean 'listen'" in done.stderr


def test_a_service_over_tls_from_registration_to_message(settings: dict[str, str], tmp_path: Path) -> None:
    for_loopback(tmp_path)
    settings |= {"TMC_TLS__CERTIFICATE": str(tmp_path / "cert.pem"), "TMC_TLS__KEY": str(tmp_path / "key.pem")}
    address = settings["TMC_SERVER__LISTEN"].replace("127.0.0.1", "localhost")
    token = _tmc("init", environment=settings).stdout.strip()
    server = subprocess.Popen([TMC, "serve"], env=os.environ | settings, stderr=subprocess.DEVNULL)
    operator = {"TMC_ADDRESS": address, "TMC_ADMIN_TOKEN": token, "TMC_CA": str(tmp_path / "cert.pem")}

    def admin(*arguments: str) -> dict:
        done = _tmc("admin", *arguments, environment=operator)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    try:
        eventually(lambda: _tmc("admin", "list-apps", environment=operator).returncode == 0)
        key = admin("register-app", "orders", "--alert-email", "orders@example.org")["key"]
        admin("register-app", "coupons")
        admin("register-topic", "order.paid", "--owner", "orders", "--spread", "3")
        made = admin("subscribe", "order.paid", "coupons", "--interval-ms", "500", "--max-retry", "0")
        assert made["retry"] == {"kind": "RETRY_KIND_LINEAR", "interval_ms": "500", "max_retry": 0, "cap_ms": "3600000"}
        center = tmc.connect(address, app="orders", key=key, tls=tmc.Tls(authority=str(tmp_path / "cert.pem")))
        eventually(lambda: _published(center))
        listed = admin("list-messages", "order.paid", "--state", "committed", "--json")
        assert [message["key"] for message in listed["messages"]] == ["one"]
        shown = admin("get-message", listed["messages"][0]["message_id"])
        assert shown["message"]["producer"] == "orders"
        signing = admin("delivery-keys", "order.paid", "coupons")["key"]
        rotated = admin("rotate-delivery-key", "order.paid", "coupons")
        assert rotated["previous"] == signing != rotated["key"]
        admin("rotate-check-token", "orders", "--reason", "routine")
        admin("disable-app", "orders", "--reason", "key lost")
        with pytest.raises(tmc.TmcError, match="disabled"):
            center.publish("order.paid", b"", key="disabled")
        admin("enable-app", "orders", "--reason", "new key")
        assert center.publish("order.paid", b"", key="enabled")
        with pytest.raises(tmc.Unavailable):
            tmc.connect(address, app="orders", key=key).publish("order.paid", b"", key="plain", timeout=_SHORT)
        refused = _tmc("admin", "list-messages", "order.paid", environment=operator | {"TMC_ADMIN_TOKEN": "wrong"})
        assert refused.returncode == 1
        assert "UNAUTHENTICATED" in refused.stderr
        center.close()
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def _published(center: tmc.Center) -> bool:
    try:
        return bool(center.publish("order.paid", b"", key="one"))
    except (tmc.NotFound, tmc.NotAuthenticated):
        return False  # the registration takes a moment to be in effect


def test_a_second_server_on_the_same_file_is_refused(settings: dict[str, str]) -> None:
    _tmc("init", environment=settings)
    first = subprocess.Popen([TMC, "serve"], env=os.environ | settings, stderr=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(settings["TMC_SERVER__LISTEN"]) as channel:
            grpc.channel_ready_future(channel).result(30)
        second = _tmc("serve", environment=settings | {"TMC_SERVER__LISTEN": "127.0.0.1:0"})
        assert second.returncode == 2
        assert "SQLite serves one server" in second.stderr
    finally:
        first.send_signal(signal.SIGTERM)
        first.wait(30)


def test_a_taken_port_is_named(settings: dict[str, str]) -> None:
    import socket

    _tmc("init", environment=settings)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = _tmc("serve", environment=settings | {"TMC_SERVER__LISTEN": f"127.0.0.1:{taken.getsockname()[1]}"})
    assert done.returncode == 2
    assert "Cannot listen on" in done.stderr
