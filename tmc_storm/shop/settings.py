"""Settings of a program of the shop, in a JSON file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import tmc_client as tmc

SETTINGS = "TMC_STORM_SETTINGS"
"""The environment variable that names a consumer's file."""

CLOSING_TIME = "closing-time"
"""A file: no orders from now on."""
WAYS = ("block", "another-block", "outbox", "publish", "order")
"""Ways in which a producer sends: its keys are NAME.LIFE.WAY.NUMBER."""


def closed_file(folder: str | Path, name: str) -> Path:
    """Return the file that a producer makes when all that it had begun after closing time is finished."""
    return Path(folder) / f"{name}.closed"


@dataclass(frozen=True, kw_only=True)
class ShopSettings:
    """address: of the center.  authority: PEM file, for TLS; empty, none.  server_name: in its certificate.

    check_address: where a producer answers checks; empty, nowhere.  per_second: orders of this process.  seed: of what it orders.
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

    def write(self) -> Path:
        """Write the file, readable by this user alone, and return its path."""
        path = Path(self.folder) / f"{self.name}.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return path

    def connect(self) -> tmc.Center:
        """Connect to the center."""
        tls = tmc.Tls(authority=self.authority, server_name=self.server_name) if self.authority else None
        return tmc.connect(self.address, app=self.app, key=self.key, tls=tls)

    @classmethod
    def read(cls, path: str) -> ShopSettings:
        """Read a file that `write` wrote."""
        return cls(**json.loads(Path(path).read_text()))
