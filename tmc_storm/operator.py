"""An operator of the center: its administrative calls by their names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc

from tmc_common.admin_calls import admin_call

_IN_TURN = [("grpc.lb_policy_name", "round_robin"), ("grpc.use_local_subchannel_pool", 1)]
_PAUSE_S = 0.2
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""CANCELLED: a server that stops gives this to calls that wait in it."""


class Operator:
    """Makes administrative calls."""

    def __init__(
        self,
        target: str,
        token: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str = "",
    ) -> None:
        """target: as gRPC takes it; of several servers, any that answers is asked.  server_name: in its certificate."""
        options = [*_IN_TURN, ("grpc.ssl_target_name_override", server_name)] if server_name else _IN_TURN
        self._channel = (
            grpc.insecure_channel(target, options)
            if credentials is None
            else grpc.secure_channel(target, credentials, options)
        )
        self._metadata = [("authorization", f"Bearer {token}")] if token else []

    def close(self) -> None:
        """Close the connections."""
        self._channel.close()

    def call(self, rpc: str, *, seconds: float = 60, **fields: Any) -> Any:
        """Make one call, and repeat it for up to `seconds` while no server answers. Raises grpc.RpcError."""
        made, call = admin_call(self._channel, rpc)
        end = time.monotonic() + seconds
        while True:
            try:
                return call(made(**fields), metadata=self._metadata, timeout=10, wait_for_ready=True)
            except grpc.RpcError as exc:
                if exc.code() not in _AGAIN or time.monotonic() > end:
                    raise
            time.sleep(_PAUSE_S)

    def pages(self, rpc: str, *, seconds: float = 60, **fields: Any) -> Iterator[Any]:
        """Yield the pages of a list. seconds: for each, see `call`."""
        page = self.call(rpc, seconds=seconds, page_size=1000, **fields)
        yield page
        while page.next_page_token:
            page = self.call(rpc, seconds=seconds, page_size=1000, page_token=page.next_page_token, **fields)
            yield page
