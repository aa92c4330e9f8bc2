"""The certificate of a server: what cannot be used, and when it ends."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.certificates import Authority, for_loopback
from tmc_server.certificates import CertificateUnusable, Renewal, read_key_pair
from tmc_server.config import TlsConfig


@pytest.fixture(params=["in memory", "on a disk"], autouse=True)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "on a disk":
        monkeypatch.delattr("os.memfd_create", raising=False)


def _tls(certificate: Path, key: Path) -> TlsConfig:
    return TlsConfig(certificate=str(certificate), key=str(key))


def test_it_says_when_it_expires_also_behind_an_authority(tmp_path: Path) -> None:
    for certificate, key in (for_loopback(tmp_path), Authority(tmp_path).issue("center", "DNS:center.test")):
        left = read_key_pair(_tls(certificate, key)).expires - datetime.now(UTC)
        assert timedelta(days=1) < left < timedelta(days=2)


def test_an_expired_certificate_is_read_and_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificate, key = for_loopback(tmp_path)
    command = [
        "openssl",
        "x509",
        "-in",
        str(certificate),
        "-signkey",
        str(key),
        "-days",
        "-1",
        "-out",
        str(certificate),
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert read_key_pair(_tls(certificate, key)).expires < datetime.now(UTC)
    Renewal(_tls(certificate, key))
    assert "clients refuse this server from" in caplog.text


def _ec_key(folder: Path) -> Path:
    path = folder / "ec.key"
    command = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def test_a_key_of_another_certificate_is_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, _ = authority.issue("center", "DNS:center.test")
    _, other = authority.issue("other", "DNS:other.test")
    for key in (other, _ec_key(tmp_path)):
        with pytest.raises(CertificateUnusable, match=rf"key {key} is not the key of the certificate {certificate}\."):
            read_key_pair(_tls(certificate, key))


def test_what_is_no_certificate_or_asks_for_a_passphrase_is_refused(tmp_path: Path) -> None:
    certificate, key = for_loopback(tmp_path)
    locked = tmp_path / "locked.pem"
    command = ["openssl", "rsa", "-aes128", "-passout", "pass:secret", "-in", str(key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    for chosen in ((certificate, locked), (key, key)):
        with pytest.raises(CertificateUnusable, match="give PEM files of a server's certificate"):
            read_key_pair(_tls(*chosen))
    with pytest.raises(FileNotFoundError, match=r"missing\.pem"):
        read_key_pair(_tls(tmp_path / "missing.pem", key))


def test_a_certificate_that_is_replaced_in_two_steps_is_used_after_the_second(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("center", "DNS:center.test")
    renewal = Renewal(_tls(certificate, key))
    assert renewal.renewed() is None
    new_certificate, new_key = authority.issue("new", "DNS:center.test")
    new_certificate.replace(certificate)
    assert renewal.renewed() is None
    new_key.replace(key)
    renewed = renewal.renewed()
    assert renewed is not None
    assert renewed.chain == certificate.read_bytes()
    assert renewal.renewed() is None


def test_what_cannot_be_read_for_a_moment_is_read_later_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = for_loopback(tmp_path)
    renewal = Renewal(_tls(certificate, key))
    away = key.rename(tmp_path / "away.pem")
    caplog.clear()
    for _ in range(3):
        assert renewal.renewed() is None
    assert len(caplog.records) == 1
    away.rename(key)
    assert renewal.renewed() is not None  # by its inode's time of change it is another one
