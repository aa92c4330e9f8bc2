"""What one archive run published: the contract between the pipeline, which writes it last, and the retention duty.

A manifest appears under its final name only when everything it lists was written, read back and compared. Beside it lie lists of
message numbers, one folder per shard, which say exactly what may be removed.

Format 2 added the digests, files and bytes of partitions, and a checksum over the whole text; format 1 is still read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tmc_server.domain.numbers import Shard

FORMAT = 2
_CHECKED_SINCE = 2  # manifests of format 1 have no checksum
_NEWER = "This manifest was written by a newer version: update this one."


class ManifestUnreadable(Exception):
    """The text is no manifest, or one of a newer format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedShard:
    """What a run took from one shard. low, high: its message numbers, both included. digest: over all columns, hexadecimal."""

    shard: Shard
    low: int
    high: int
    messages: int
    consumptions: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One folder of files. digest: over all columns of its rows, hexadecimal.  files, bytes: of its Parquet files.

    An empty digest: format 1, which knew none of the three.
    """

    day: str
    topic: str
    messages: int
    digest: str = ""
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """since_ms <= closing time < before_ms, but for what earlier runs had. names: topics, apps, subscriptions by number."""

    run: str
    since_ms: int
    before_ms: int
    written_ms: int
    shards: tuple[ArchivedShard, ...]
    partitions: tuple[Partition, ...]
    names: Mapping[str, Mapping[str, Sequence[str] | str]]

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self.shards)

    @property
    def consumptions(self) -> int:
        return sum(each.consumptions for each in self.shards)

    def to_json(self) -> str:
        values = {"format": FORMAT, **asdict(self)}
        return json.dumps({**values, "checksum": _checksum(values)}, indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, run: str) -> Manifest:
        """Read the manifest of `run`. Raises ManifestUnreadable: also when it was edited, or is another run's."""
        try:
            values = json.loads(text)
            checksum = values.pop("checksum", None)
            if values["format"] > FORMAT:
                raise ManifestUnreadable(_NEWER)
            if values["format"] >= _CHECKED_SINCE and checksum != _checksum(values):
                raise ManifestUnreadable("It was edited or damaged after it was published: its checksum differs.")
            if values["run"] != run:
                raise ManifestUnreadable(f"It is the manifest of run {values['run']}, copied under another name.")
            del values["format"]
            shards = tuple(ArchivedShard(**each) for each in values.pop("shards"))
            partitions = tuple(Partition(**each) for each in values.pop("partitions"))
            return cls(shards=shards, partitions=partitions, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise ManifestUnreadable(f"This is no manifest: {exc}.") from exc


def _checksum(values: Mapping[str, object]) -> str:
    """SHA-256 over the values in one fixed order, hexadecimal: finds damage and careless edits, not a forger."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def manifest_name(run: str) -> str:
    """Path of a manifest inside an archive."""
    return f"manifests/{run}.json"


def intent_name(run: str) -> str:
    """Path of a manifest before it is published: publishing renames it, so while it exists the run is unpublished."""
    return f"intents/{run}.json"


def removal_folder(run: str, shard: Shard) -> str:
    """Path of the folder with the message numbers of one shard, one in a line, inside an archive."""
    return f"removal/{run}/shard={shard}"
