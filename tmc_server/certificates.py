"""The certificate of a server: examined at the start and by `tmc doctor`, and read again when its files change."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tmc_common.eventlog import EventLog
from tmc_server.config import TlsConfig

log = EventLog("tmc.tls")

EXPIRES_SOON = timedelta(days=14)
_IGNORE_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which the ssl module does not name
_ROUND_TRIPS = 4


class CertificateUnusable(Exception):
    """No server can use this certificate; the text names the file."""


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """A private key and its certificate chain, in PEM. expires: when the certificate becomes invalid."""

    key: bytes
    chain: bytes
    expires: datetime


def read_key_pair(tls: TlsConfig) -> KeyPair:
    """Read the files of [tls]. Raises OSError, CertificateUnusable."""
    assert tls.certificate is not None
    assert tls.key is not None
    key, chain = Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(tls.certificate, tls.key, password="")  # without it, an encrypted key asks the terminal
        expires = _expires(server, tls.certificate)
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise CertificateUnusable(
                f"[tls] key {tls.key} is not the key of the certificate {tls.certificate}."
            ) from exc
        raise CertificateUnusable(
            f"[tls] certificate {tls.certificate} and key {tls.key} cannot be used by a server ({exc.reason or exc}): give PEM "
            "files of a server's certificate and of its private key, unencrypted."
        ) from exc
    return KeyPair(key=key, chain=chain, expires=expires)


def _expires(server: ssl.SSLContext, certificate: str) -> datetime:
    """Shake hands with a client that trusts this very certificate: the ssl module shows a certificate to its peer alone."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(certificate)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_IGNORE_TIME)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    for _ in range(_ROUND_TRIPS):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    shown = ends[0].getpeercert()
    assert shown is not None
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), UTC)


def warn_before_expiry(tls: TlsConfig) -> None:
    """Log when clients will refuse this server soon. Raises OSError, CertificateUnusable."""
    expires = read_key_pair(tls).expires
    if expires - datetime.now(UTC) < EXPIRES_SOON:
        log.warning("certificate_expires", "clients refuse this server from %s on: renew [tls] certificate", expires)


class Renewal:
    """Notices that the files of [tls] were replaced. Called from any thread."""

    def __init__(self, tls: TlsConfig) -> None:
        """Raises OSError, CertificateUnusable."""
        self._tls = tls
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self.pair = read_key_pair(tls)

    def renewed(self) -> KeyPair | None:
        """Return the key pair if it is another one than at the call before; None: it is not, or cannot be used."""
        with self._lock:
            try:
                stamps = self._stamps()
                if stamps == self._seen:
                    return None
                self._seen = stamps
                self.pair = read_key_pair(self._tls)
            except (
                OSError,
                CertificateUnusable,
            ) as exc:  # the second file may not be there yet: it changes the stamps again
                log.warning("certificate_not_renewed", "the certificate in use is kept: %s", exc)
                return None
            log.info("certificate_renewed", "a certificate that expires on %s is used now", self.pair.expires.date())
            return self.pair

    def _stamps(self) -> Sequence[tuple[int, int]]:
        files = [Path(str(path)).stat() for path in (self._tls.certificate, self._tls.key)]
        return [(each.st_ino, each.st_mtime_ns) for each in files]
