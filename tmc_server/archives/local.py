"""Removal lists in a folder of this machine: an archive itself, or a copy of its `manifests` and `removal` folders."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from tmc_server.domain.manifest import Manifest, ManifestUnreadable, removal_folder
from tmc_server.domain.numbers import MessageNumber, Shard
from tmc_server.domain.ports.retention import ListUnreadable


class LocalArchive:
    """domain.ports.retention.RemovalLists. The same format as tmc_pipeline writes; nothing here needs Spark or Parquet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Manifest] = {}

    def runs(self) -> Sequence[Manifest]:
        folder = self._folder / "manifests"
        try:
            paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
        except OSError as exc:
            raise ListUnreadable(
                f"{folder} cannot be read: {exc.strerror}. Is the archive mounted, and has a run published there?"
            ) from exc
        return [self._manifest(path) for path in paths]

    def _manifest(self, path: Path) -> Manifest:
        if path.name not in self._known:  # a manifest never changes
            try:
                self._known[path.name] = Manifest.from_json(path.read_text(), path.stem)
            except (OSError, ValueError, ManifestUnreadable) as exc:
                raise ListUnreadable(f"{path}: {exc}") from exc
        return self._known[path.name]

    def numbers(self, run: str, shard: Shard) -> Sequence[MessageNumber]:
        found = array("q")  # eight bytes each, where a list of ints has forty
        try:
            for path in sorted((self._folder / removal_folder(run, shard)).glob("part-*")):
                found.extend(int(line) for line in path.read_text().split())
        except (OSError, ValueError) as exc:
            raise ListUnreadable(f"The list of run {run}, shard {shard} cannot be read: {exc}.") from exc
        known = next((each for each in self._known[f"{run}.json"].shards if each.shard == shard), None)
        expected = known.messages if known is not None else 0
        if len(found) != expected:
            raise ListUnreadable(
                f"The list of run {run}, shard {shard} has {len(found)} numbers instead of {expected}."
            )
        return cast("Sequence[MessageNumber]", array("q", sorted(found)))
