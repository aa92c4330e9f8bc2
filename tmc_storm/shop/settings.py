"""Settings of a program of the shop, in a JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import tmc_client as tmc
from tmc_client import aio

SETTINGS = "TMC_STORM_SETTINGS"
"""The environment variable that names a consumer's file."""

CLOSING_TIME = "closing-time"
"""A file: no orders from now on."""


class Way(StrEnum):
    """A way in which a producer sends: its keys are NAME.LIFE.WAY.NUMBER."""

    BLOCK = "block"
    ANOTHER_BLOCK = "another-block"
    ASYNC_BLOCK = "async-block"
    ANOTHER_ASYNC_BLOCK = "another-async-block"
    OUTBOX = "outbox"
    PUBLISH = "publish"
    ORDER = "order"
    HTTP = "http"
    QUEUE = "queue"


def closed_file(folder: str | Path, name: str) -> Path:
    """Return the file that a producer makes when all that it had begun after closing time is finished."""
    return Path(folder) / f"{name}.closed"


@dataclass(frozen=True, kw_only=True)
class ShopSettings:
    """Settings of one program.

    address: of the center.  authority: PEM file, for TLS; empty, none.  server_name: in its certificate.
    check_address: where a producer answers checks; empty, nowhere.  per_second: orders of this process.  seed: of what it orders.
    http: host:port of its servers' HTTP doors; empty, none.  queue: address of its submit queue; empty, none.  submit_secret: of
    that queue.  listen: host:port where webhooks come.  webhook_keys: by topic, the key of their signatures, hexadecimal.
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
    webhook_keys: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def ways(self) -> Sequence[Way]:
        """Return the ways in which this producer sends: some doors of the center may be closed."""
        closed = {way for way, door in ((Way.HTTP, self.http), (Way.QUEUE, self.queue)) if not door}
        return [way for way in Way if way not in closed]

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
