"""The modes in which one server runs: of its own, for developers, or inside another process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import make_url

from tmc_server.app.maintenance import CannotStart
from tmc_server.config import ChecksConfig, Config, ConfigError, WebhooksConfig, load
from tmc_server.domain.ports.delivery import Copy


@dataclass(frozen=True, kw_only=True)
class RunMode:
    """How a server is run.

    is_open: it makes its schema at the start and names at their first use; changes take effect at once; it is alone on
    its databases.
    secret: with is_open, what callers must present as their key; empty: everyone on loopback is welcome.
    clock: replaces the databases' clock, milliseconds since the epoch.
    is_manual: duties and checks run only when they are asked to, in the thread that asks.
    on_copies: called with all copies that go to consumers' streams, from any thread.
    """

    is_open: bool = False
    secret: str = ""
    clock: Callable[[], int] | None = None
    is_manual: bool = False
    on_copies: Callable[[Sequence[Copy]], None] | None = None

    def monotonic(self) -> float:
        """Seconds, for pauses that are not stored."""
        return self.clock() / 1000 if self.clock is not None else time.monotonic()


SERVER = RunMode()
DEV = RunMode(is_open=True)


def in_one_process(config: Config, database: str, port: int, http_port: int | None = None) -> Config:
    """The configuration of a center that is one process, on one database and on loopback.

    database: SQLAlchemy URL.  port: 0 takes a free one.  http_port: None: gRPC only. Raises CannotStart.
    """
    try:
        store = load(environment={"TMC_STORE__CATALOG": database}).store
    except ConfigError as exc:
        raise CannotStart(str(exc)) from exc
    url = make_url(database)
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise CannotStart("In memory each connection would see another database: name a file, sqlite:///FILE.")
    return config.model_copy(
        update={
            "server": config.server.model_copy(update={"listen": f"127.0.0.1:{port}", "workers": 1}),
            "http": config.http.model_copy(update={"listen": f"127.0.0.1:{http_port}" if http_port else ""}),
            "store": store,
            # Producers on this machine say where they answer checks.
            "discovery": config.discovery.model_copy(update={"kind": "recorded"}),
            **{name: _reaching_here(getattr(config, name)) for name in ("checks", "webhooks")},
        }
    )


def _reaching_here(section: ChecksConfig | WebhooksConfig) -> ChecksConfig | WebhooksConfig:
    return section.model_copy(update={"allow": (*section.allow, "127.0.0.0/8:*", "::1/128:*")})
