"""What one archive run published: the contract between the pipeline, which writes it last, and the retention duty.

A manifest appears under its final name only when everything it lists was written, read back and compared. Beside it lie lists of
message numbers, one folder per shard, which say exactly what may be removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FORMAT = 1


class ManifestUnreadable(Exception):
    """The text is no manifest, or one of a newer format."""


@dataclass(frozen=True, slots=True)
class ArchivedShard:
    """What a run took from one shard. low, high: its message numbers, both included. digest: over all columns, hexadecimal."""

    shard: int
    low: int
    high: int
    messages: int
    consumptions: int
    digest: str


@dataclass(frozen=True, slots=True)
class Partition:
    """One folder of files."""

    day: str
    topic: str
    messages: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """since_ms <= closing time < before_ms, but for what earlier runs had. names: topics, apps, subscriptions by number."""

    run: str
    since_ms: int
    before_ms: int
    written_ms: int
    shards: tuple[ArchivedShard, ...]
    partitions: tuple[Partition, ...]
    names: Mapping[str, Mapping[str, Any]]

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self.shards)

    @property
    def consumptions(self) -> int:
        return sum(each.consumptions for each in self.shards)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ManifestUnreadable."""
        try:
            values = json.loads(text)
            if values.pop("format") != FORMAT:
                raise ManifestUnreadable("This manifest was written by a newer version: update this one.")
            shards = tuple(ArchivedShard(**each) for each in values.pop("shards"))
            partitions = tuple(Partition(**each) for each in values.pop("partitions"))
            return cls(shards=shards, partitions=partitions, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise ManifestUnreadable(f"This is no manifest: {exc}.") from exc


def manifest_name(run: str) -> str:
    """Path of a manifest inside an archive."""
    return f"manifests/{run}.json"


def removal_folder(run: str, shard: int) -> str:
    """Path of the folder with the message numbers of one shard, one in a line, inside an archive."""
    return f"removal/{run}/shard={shard}"
