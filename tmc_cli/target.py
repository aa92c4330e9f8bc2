"""The server that `tmc admin` and `tmc health` call, the channel to it, and why a call failed."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import grpc

from tmc_cli import fail
from tmc_common.addresses import HostPort
from tmc_common.mismatch import spoken_instead
from tmc_common.proxies import by_proxy, proxy_options

DEFAULT_ADDRESS = "127.0.0.1:50051"
_PROBE_S = 3.0
_PLAINTEXT = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")


@dataclass(frozen=True, kw_only=True)
class Target:
    """address: host:port.  The others: PEM files and the name in the server's certificate; empty: not given."""

    address: str
    authority: str = ""
    certificate: str = ""
    key: str = ""
    server_name: str = ""

    @property
    def is_tls(self) -> bool:
        return bool(self.authority or self.certificate)

    def check(self) -> None:
        """Ends the command when the options do not fit together."""
        try:
            HostPort.parse(self.address)
        except ValueError:
            fail(f"{self.address!r} is no address of a server: give host:port.")
        if bool(self.certificate) != bool(self.key):
            fail("--certificate and --key go together (TMC_CERTIFICATE, TMC_CERTIFICATE_KEY).")
        if self.server_name and not self.is_tls:
            fail("--server-name is for TLS: give --authority too (TMC_CA).")

    @property
    def options(self) -> list[tuple[str, str | int]]:
        """Return the options of a channel. Ends the command when TMC_PROXY is no proxy."""
        try:
            options = list(proxy_options())
        except ValueError as exc:
            fail(f"{exc}.")
        return [*options, ("grpc.ssl_target_name_override", self.server_name)] if self.server_name else options

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return credentials; None for plaintext. Ends the command when a PEM file cannot be read."""
        if not self.is_tls:
            return None
        return grpc.ssl_channel_credentials(
            _pem("--authority", self.authority), _pem("--key", self.key), _pem("--certificate", self.certificate)
        )

    def channel(self) -> grpc.Channel:
        """Ends the command when a PEM file cannot be read."""
        credentials = self.credentials()
        if credentials is None:
            return grpc.insecure_channel(self.address, self.options)
        return grpc.secure_channel(self.address, credentials, self.options)

    def explain(self, exc: grpc.RpcError) -> str:
        """Explain a failed call; if it did not reach the server, probe the address for the reason."""
        code = exc.code()
        found = ""
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            found = self._probe()
            if not found and (instead := spoken_instead(exc.details() or "")):
                found = f"What answers at {self.address} speaks {instead}: is this the server's address (TMC_ADDRESS)?"
        if not found and code is grpc.StatusCode.DEADLINE_EXCEEDED:
            found = f"{self.address} did not answer in time: what you asked for may have been done. Look before you repeat it."
        proxy = by_proxy() if code is grpc.StatusCode.UNAVAILABLE else ""
        return f"{found}{proxy}" if found else f"{code.name}: {exc.details()}{proxy}"

    def _probe(self) -> str:
        """Connect to find out what is wrong. Returns: one sentence; "" if such a connection works."""
        place = HostPort.parse(self.address)
        try:
            connection = socket.create_connection(place, _PROBE_S)
        except socket.gaierror:
            return f"There is no host {place.host!r}: check the address (TMC_ADDRESS)."
        except ConnectionRefusedError:
            return f"Nobody listens on {self.address}: is the server running, and is this its address (TMC_ADDRESS)?"
        except OSError as exc:
            return f"{self.address} cannot be reached: {exc.strerror or exc}."
        with connection:
            connection.settimeout(_PROBE_S)
            return self._probe_tls(connection) if self.is_tls else self._probe_plaintext(connection)

    def _probe_plaintext(self, connection: socket.socket) -> str:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only whether it is TLS; nothing is sent
        context.set_alpn_protocols(["h2"])
        try:
            context.wrap_socket(connection).close()
        except ssl.SSLError as exc:
            if "ALERT" not in (exc.reason or ""):
                return ""
        except OSError:
            return ""
        return f"{self.address} speaks TLS: give --authority CA.pem (TMC_CA)."

    def _probe_tls(self, connection: socket.socket) -> str:
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.authority or None)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError:
            return "--authority must be a PEM file of certificates, --key the private key of --certificate."
        context.set_alpn_protocols(["h2"])
        try:
            with context.wrap_socket(
                connection, server_hostname=self.server_name or HostPort.parse(self.address).host
            ) as wrapped:
                # A server speaks first. With TLS 1.3 it looks at our certificate after the handshake, and hangs up.
                welcome = wrapped.recv(1)
        except ssl.SSLCertVerificationError as exc:
            way_out = "check --authority (TMC_CA)"
            if "mismatch" in exc.verify_message:
                way_out = "give a name that is in it: --server-name NAME (TMC_SERVER_NAME)"
            elif "expired" in exc.verify_message:
                way_out = "the server needs a new one, or its authority does"
            return f"The certificate of {self.address} is refused ({exc.verify_message.rstrip('.')}): {way_out}."
        except ssl.SSLError as exc:
            if exc.reason in _PLAINTEXT:
                return f"{self.address} does not speak TLS: leave out --authority (TMC_CA), or set [tls] of the server."
            welcome = b""
        except TimeoutError:
            return ""
        except OSError:
            welcome = b""
        if welcome:
            return ""
        return (
            f"{self.address} hangs up: it wants a client certificate of an authority it trusts, "
            "give --certificate and --key (TMC_CERTIFICATE, TMC_CERTIFICATE_KEY)."
        )


def first_that_listens(addresses: str) -> str:
    """Choose one of several addresses with commas between them, as the SDK takes them.

    Returns: the first that can be reached, else the first.
    """
    given = [each.strip() for each in addresses.split(",")]
    for address in given if len(given) > 1 else ():
        try:
            socket.create_connection(HostPort.parse(address), _PROBE_S).close()
        except (OSError, ValueError):
            continue
        return address
    return given[0]


def _pem(option: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        fail(f"{option}: cannot read {path}: {exc.strerror}.")
