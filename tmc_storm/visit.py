"""A center that runs already: we are an app among others there, and strike nothing but our own processes and connections."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tmc_common.addresses import HostPort
from tmc_storm.operator import Operator
from tmc_storm.scene import Scene
from tmc_storm.shop import books

_REASON = "tmc storm"


@dataclass(frozen=True, kw_only=True)
class Host:
    """The center to visit.

    address: host:port of a server.  token: of an administrator.  authority: PEM file, for TLS; empty, none.
    server_name: in its certificate; empty, the host.
    check_address: host:port of this machine that the center may ask about undecided messages; empty, it cannot.
    """

    address: str
    token: str = field(default="", repr=False)
    authority: str = ""
    server_name: str = ""
    check_address: str = ""


class CannotVisit(Exception):
    """The center does not answer, does not let us in, or has another storm."""


class Visit(Scene):
    """Our connections to somebody's center, with a proxy in them. What we registered there is removed at the end."""

    def __init__(self, host: Host, folder: Path) -> None:
        super().__init__(folder)
        self.host = host
        self.has_checks = bool(host.check_address)
        address = HostPort.parse(host.address)
        self.authority, self.server_name = host.authority, host.server_name or address.host
        self._proxy = self.link("client", "server", address.host, address.port)
        credentials = grpc.ssl_channel_credentials(Path(host.authority).read_bytes()) if host.authority else None
        self.operator = Operator(host.address, host.token, credentials=credentials, server_name=host.server_name)
        self._open.callback(self.operator.close)
        try:
            self._enter()
        except BaseException:
            self._open.close()
            raise
        self._open.callback(self._leave)

    def _enter(self) -> None:
        """Raises CannotVisit: nothing has been changed there."""
        if self.host.check_address:
            check = HostPort.parse(self.host.check_address)
            try:
                socket.create_server((check.host, check.port)).close()
            except OSError as exc:
                raise CannotVisit(f"--check-address {self.host.check_address}: {exc.strerror}.") from exc
        ours = {books.ORDERS_APP, *books.SUBSCRIPTIONS}
        try:
            busy = [
                app.id for page in self.operator.pages("ListApps", seconds=5) for app in page.apps if not app.disabled
            ]
        except grpc.RpcError as exc:
            raise CannotVisit(f"No center that lets us in answers at {self.host.address}: {exc.details()}") from exc
        if busy := sorted(ours & set(busy)):
            raise CannotVisit(
                f"Another storm is at {self.host.address}, or was killed there: one at a time. If none is, disable its apps "
                f"first, for example: tmc admin disable-app {busy[0]} --reason over"
            )
        self._tidy()

    @property
    def addresses(self) -> str:
        return self._proxy.address

    def _tidy(self) -> None:
        """Remove our subscriptions, and resume our topics: a storm that was killed may have left both."""
        for app, topics in books.SUBSCRIPTIONS.items():
            for topic in topics:
                self._try("RemoveSubscription", topic=topic, app=app)
        for topic in books.TOPICS:
            self._try("ResumeTopic", name=topic, reason=_REASON)

    def _leave(self) -> None:
        """Disable our apps, too; their messages go when the center's retention removes them."""
        self._tidy()
        for app in (books.ORDERS_APP, *books.SUBSCRIPTIONS):
            self._try("DisableApp", id=app, reason=_REASON)

    def _try(self, rpc: str, **fields: str) -> None:
        try:
            self.operator.call(rpc, seconds=10, **fields)
        except grpc.RpcError:
            return  # it was never registered, or the center has gone
