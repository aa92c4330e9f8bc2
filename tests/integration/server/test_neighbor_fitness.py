"""`tmc doctor` on all that is neither database nor broker: files, certificates, Consul, Kafka, mail, logins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiosmtpd.controller import Controller

from tests.support.certificates import for_loopback
from tests.support.kafka import Kafka
from tests.support.oidc import provider
from tmc_server.app.neighbor_fitness import examine_neighbors
from tmc_server.config import Config
from tmc_storm.services.ports import free_port

NOBODY = "127.0.0.1:1"


def _findings(**settings: object) -> list[str]:
    return list(map(str, examine_neighbors(Config.model_validate(settings), "")))


def test_the_doctor_looks_at_certificate_consul_and_archive(tmp_path: Path) -> None:
    certificate, key = for_loopback(tmp_path)
    found = _findings(
        tls={"certificate": str(certificate), "key": str(key)},
        consul={"agent": "127.0.0.1:1"},
        retention={"kind": "archive", "archive": str(tmp_path / "nowhere")},
    )
    assert [line[:5] for line in found] == ["BAD  ", "BAD  ", "ok   ", "BAD  "]
    assert "must be renewed now" in found[0]  # it lasts for two days
    assert "check [consul] agent and token" in found[1]
    assert "must be the archive of this center." in found[3]
    (unusable, _) = _findings(tls={"certificate": str(key), "key": str(key)})
    assert unusable.startswith("BAD  TLS, certificate = , must be usable. [tls] certificate")


def test_the_doctor_says_that_nobody_can_be_asked() -> None:
    (nobody,) = _findings()
    assert "NOBODY can be asked: [checks] allow" in nobody
    (somebody,) = _findings(checks={"allow": ["10.0.0.0/8:*"]})
    assert somebody == "ok   checks = services are found by discovery.kind recorded"
    (listed,) = _findings(discovery={"instances": {"orders": ["127.0.0.1:1"]}})
    assert listed == "ok   checks = services are found by discovery.kind static"


@contextmanager
def _mail_server() -> Iterator[int]:
    port = free_port()
    controller = Controller(object(), hostname="127.0.0.1", port=port)
    controller.start()
    try:
        yield port
    finally:
        controller.stop()


def test_the_doctor_logs_in_at_the_mail_server() -> None:
    with _mail_server() as port:
        mail = {
            "smtp_host": "127.0.0.1",
            "smtp_port": port,
            "mail_from": "tmc@example.org",
            "mail_to": ["a@example.org"],
        }
        (_, well) = _findings(alerts=mail | {"smtp_security": "none"})
        assert well == f"ok   mail server = 127.0.0.1:{port}"
        (_, without_tls) = _findings(alerts=mail)
        assert without_tls.startswith(
            f"BAD  mail server = 127.0.0.1:{port}, must take mail from this user: check smtp_*"
        )
    (_, away) = _findings(alerts=mail | {"smtp_security": "none"})
    assert "Connection refused" in away


def test_the_doctor_asks_the_openid_provider_for_its_keys() -> None:
    with provider() as issuer:
        (_, well) = _findings(oidc={"issuer": issuer, "audiences": ["tmc"]})
        assert well == f"ok   OpenID provider = {issuer}"
        (_, another) = _findings(oidc={"issuer": f"{issuer}/", "audiences": ["tmc"]})
        assert "check [oidc] issuer (the provider calls itself" in another
    (_, away) = _findings(oidc={"issuer": f"http://{NOBODY}", "audiences": ["tmc"]})
    assert away.startswith(f"BAD  OpenID provider = http://{NOBODY}, must publish its keys: check [oidc] issuer (")


@pytest.mark.services
def test_the_doctor_asks_kafka_for_its_brokers(kafka: Kafka) -> None:
    (_, well) = _findings(kafka={"bootstrap": kafka.bootstrap})
    assert well == f"ok   Kafka = {kafka.bootstrap}, 1 brokers"
    (_, away) = _findings(kafka={"bootstrap": NOBODY})
    assert "check [kafka] bootstrap and settings (" in away
    assert "refused" in away
    (_, mistyped) = _findings(kafka={"bootstrap": NOBODY, "settings": {"sasl.mechanim": "PLAIN"}})
    assert "No such configuration property" in mistyped
