"""The app's check token, which only the center can present."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable

import grpc

from tmc_client import errors
from tmc_client.connecting import wire
from tmc_client.connecting.connection import Caller, announcement
from tmc_client.forks import watch_forks
from tmc_common.protocol import message_pb2

log = logging.getLogger("tmc_client.checks")

_METHOD = "/tmc.v1.MessageService/DescribeChecks"
_ASK_AGAIN_S = 5.0
_ASK_FIRST_S = 1.0
_PREVIOUS_S = 60.0  # servers of the center learn of a rotation one after the other


class CheckToken:
    """The token in this app's checks, fetched from the center on first use and again when a check has another one.

    After a rotation the previous token stays valid for another minute.
    """

    def __init__(self, connection: Caller, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._token = ""
        self._previous = ("", 0.0)
        self._asked = float("-inf")
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware."""
        self._lock, self._asking = threading.Lock(), threading.Lock()

    def is_right(self, shown: str) -> bool:
        """Compare a token in constant time. Raises TmcError: ours is not known yet, and the center does not answer.

        A token that does not match makes us ask the center, one thread at a time and at most every five seconds, or every
        second until we know ours: strangers cannot occupy our threads.
        """
        if self._matches(shown):
            return True
        pause_s = _ASK_AGAIN_S if self._token else _ASK_FIRST_S
        if self._monotonic() - self._asked < pause_s or not self._asking.acquire(blocking=False):
            if self._token:
                return False
            raise errors.Unavailable("The center was asked a moment ago and has not answered yet.")
        try:
            self._asked = self._monotonic()
            found = self._ask()
            with self._lock:
                self._keep(found)
        finally:
            self._asking.release()
        return self._matches(shown)

    def _matches(self, shown: str) -> bool:
        previous, until = self._previous
        right = [self._token, previous if self._monotonic() < until else ""]
        found = [hmac.compare_digest(shown.encode(errors="replace"), token.encode()) for token in right if token]
        return any(found)

    def _keep(self, token: str) -> None:
        """Keep it. Called under the lock."""
        if self._token and token != self._token:
            self._previous = (self._token, self._monotonic() + _PREVIOUS_S)
        self._token, self._asked = token, self._monotonic()

    def learn(self, address: str = "", ledger_id: bytes = b"") -> bool:
        """Fetch the token, by a call that says where we answer checks, and from which ledger. Returns: the center answered."""
        try:
            token = self._ask(address, ledger_id)
        except errors.TmcError as exc:
            log.info("the center will learn later where checks are answered: %s", exc)
            return False
        with self._lock:
            self._keep(token)
        return True

    def _ask(self, address: str = "", ledger_id: bytes = b"") -> str:
        said = announcement(address, ledger_id)  # comes after what every call says, and counts instead of it
        try:
            method = self._connection.unary(_METHOD, message_pb2.DescribeChecksResponse)
            found: str = method(message_pb2.DescribeChecksRequest(), timeout=2.0, metadata=said).check_token
        except grpc.RpcError as exc:
            raise wire.from_rpc(exc) from exc
        return found
