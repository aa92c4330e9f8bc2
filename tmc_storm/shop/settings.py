"""Settings of a program of the shop, in a JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tmc_client as tmc
from tmc_client import aio

SETTINGS = "TMC_STORM_SETTINGS"
"""The environment variable that names a consumer's file."""

CLOSING_TIME = "closing-time"
"""A file: no orders from now on."""
WAYS = ("block", "another-block", "async-block", "outbox", "publish", "order")
"""Ways in which every producer sends: its keys are NAME.LIFE.WAY.NUMBER."""
HTTP, QUEUE = "http", "queue"
"""Doors of a center that may be closed."""


def closed_file(folder: str | Path, name: str) -> Path:
    """Return the file that a producer makes when all that it had begun after closing time is finished."""
    return Path(folder) / f"{name}.closed"


@dataclass(frozen=True, kw_only=True)
class ShopSettings:
    """address: of the center.  authority: PEM file, for TLS; empty, none.  server_name: in its certificate.

    check_address: where a producer answers checks; empty, nowhere.  per_second: orders of this process.  seed: of what it orders.
    http: host:port of its servers' HTTP doors; empty, none.  queue: address of its submit queue; empty, none.  submit_secret: of
    that queue.  listen: host:port where webhooks come.
    """

    name: str
    app: str
    key: str = field(repr=False)
    address: str
    database: str
    folder: str
    authority: str = ""
    server_name: str = ""
    check_address: str = ""
    per_second: float = 10.0
    seed: int = 0
    http: Sequence[str] = ()
    queue: str = ""
    submit_secret: str = field(default="", repr=False)
    listen: str = ""

    @property
    def ways(self) -> Sequence[str]:
        """Return the ways in which this producer sends."""
        return (*WAYS, *(way for way, door in ((HTTP, self.http), (QUEUE, self.queue)) if door))

    def write(self) -> Path:
        """Write the file, readable by this user alone, and return its path."""
        path = Path(self.folder) / f"{self.name}.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return path

    def connect(self) -> tmc.Center:
        """Connect to the center."""
        return tmc.connect(self.address, app=self.app, key=self.key, tls=self._tls)

    def connect_async(self) -> aio.AsyncCenter:
        """Connect to it from asyncio."""
        return aio.connect(self.address, app=self.app, key=self.key, tls=self._tls)

    def connect_through_queue(self) -> tmc.Center:
        """Connect to it through the submit queue."""
        return tmc.connect(self.queue, app=self.app, key=self.submit_secret)

    @property
    def _tls(self) -> tmc.Tls | None:
        return tmc.Tls(authority=self.authority, server_name=self.server_name) if self.authority else None

    @classmethod
    def read(cls, path: str) -> ShopSettings:
        """Read a file that `write` wrote."""
        return cls(**json.loads(Path(path).read_text()))
