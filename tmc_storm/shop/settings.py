"""What a program of the shop is told: a JSON file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

SETTINGS = "TMC_STORM_SETTINGS"
"""The environment variable that names a consumer's file."""

CLOSING_TIME = "closing-time"
"""A file: no orders from now on."""


@dataclass(frozen=True, kw_only=True)
class ShopSettings:
    """address: of the center.  check_port: where a producer answers checks.  per_second: orders of this process.

    seed: of what it orders.
    """

    name: str
    app: str
    key: str
    address: str
    database: str
    folder: str
    check_port: int = 0
    per_second: float = 10.0
    seed: int = 0

    def write(self) -> Path:
        """Write the file, readable by this user alone, and return its path."""
        path = Path(self.folder) / f"{self.name}.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return path

    @classmethod
    def read(cls, path: str) -> ShopSettings:
        """Read a file that `write` wrote."""
        return cls(**json.loads(Path(path).read_text()))
