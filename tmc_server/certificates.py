"""The certificate of a server: examined at the start and by `tmc doctor`, and read again when its files change."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryFile

from tmc_common.eventlog import EventLog
from tmc_server.config import TlsConfig
from tmc_server.metrics import METRICS

log = EventLog("tmc.tls")

EXPIRES_SOON = timedelta(days=14)
_IGNORE_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which the ssl module does not name
_ROUND_TRIPS = 4
_OF_ANOTHER = ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED")  # the second: one is RSA, the other EC


class CertificateUnusable(Exception):
    """No server can use this certificate; the text names the file."""


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """A private key and its certificate chain, in PEM. expires: when the certificate becomes invalid."""

    key: bytes
    chain: bytes
    expires: datetime

    def context(self) -> ssl.SSLContext:
        """Return a new context for servers. Raises ssl.SSLError."""
        return _context_of(self.chain, self.key)


def read_key_pair(tls: TlsConfig) -> KeyPair:
    """Read the files of [tls], each once. Raises OSError, CertificateUnusable."""
    assert tls.certificate is not None
    assert tls.key is not None
    key, chain = Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes()
    try:
        expires = _expires(_context_of(chain, key), chain.decode())
    except (ssl.SSLError, ValueError) as exc:
        reason = getattr(exc, "verify_message", "") or getattr(exc, "reason", "") or str(exc)
        if reason in _OF_ANOTHER:
            raise CertificateUnusable(
                f"[tls] key {tls.key} is not the key of the certificate {tls.certificate}."
            ) from exc
        raise CertificateUnusable(
            f"[tls] certificate {tls.certificate} and key {tls.key} cannot be used by a server ({reason}): give PEM files of a "
            "server's certificate and of its private key, unencrypted."
        ) from exc
    return KeyPair(key=key, chain=chain, expires=expires)


def _context_of(chain: bytes, key: bytes) -> ssl.SSLContext:
    """Return a context with what was read, which the ssl module takes from files alone."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _in_memory(chain) as certificate, _in_memory(key) as private:
        made.load_cert_chain(certificate, private, password="")  # without it, an encrypted key asks the terminal
    return made


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Yield the path of a file without a name: in memory, where this Python can (uv's cannot, nor can macOS), or on a disk."""
    with os.fdopen(os.memfd_create("pem"), "w+b") if hasattr(os, "memfd_create") else TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield f"/dev/fd/{file.fileno()}"


def _expires(server: ssl.SSLContext, chain: str) -> datetime:
    """Shake hands with a client that trusts this very certificate: the ssl module shows a certificate to its peer alone."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cadata=chain)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_IGNORE_TIME)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    for _ in range(_ROUND_TRIPS):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    shown = ends[0].getpeercert()
    if not shown:
        raise ValueError("no client can use it")
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), UTC)


class Renewal:
    """The key pair of a server, as its files are. Used from any thread."""

    def __init__(self, tls: TlsConfig) -> None:
        """Read the files. Raises OSError, CertificateUnusable."""
        self._tls = tls
        self._lock = threading.Lock()
        self._complaint = ""
        self._seen = self._stamps()
        self.pair = read_key_pair(tls)
        METRICS.certificate_expires_timestamp_seconds.set(self.pair.expires.timestamp())
        if self.pair.expires - datetime.now(UTC) < EXPIRES_SOON:
            log.warning("certificate_expires", "clients refuse this server from %s on: renew it", self.pair.expires)

    def renewed(self) -> KeyPair | None:
        """Return the key pair if it is another one than at the call before; None: it is not, or cannot be used."""
        with self._lock:
            try:
                stamps = self._stamps()
                if stamps == self._seen:
                    return None
                pair = read_key_pair(self._tls)
            except OSError as exc:  # it may be over at the next connection
                self._complain(str(exc))
                return None
            except (
                CertificateUnusable
            ) as exc:  # perhaps the other file is not there yet, which changes the stamps again
                self._seen = stamps
                self._complain(str(exc))
                return None
            self._seen, self.pair, self._complaint = stamps, pair, ""
            METRICS.certificate_expires_timestamp_seconds.set(pair.expires.timestamp())
            log.info("certificate_renewed", "a certificate that expires on %s is used now", pair.expires.date())
            return pair

    def _complain(self, text: str) -> None:
        """Say the same once: strangers can connect as often as they like."""
        if text != self._complaint:
            self._complaint = text
            log.warning("certificate_not_renewed", "the certificate in use is kept: %s", text)

    def _stamps(self) -> Sequence[tuple[int, ...]]:
        files = [Path(str(path)).stat() for path in (self._tls.certificate, self._tls.key)]
        return [(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in files]
