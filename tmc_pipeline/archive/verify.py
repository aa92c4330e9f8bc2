"""Verify an archive: every row against its fingerprint, every folder against its manifest, every list against its length."""

from __future__ import annotations

from dataclasses import dataclass

from tmc_pipeline.archive.contents import Archive
from tmc_pipeline.errors import translated
from tmc_server.domain.manifest import Manifest, removal_folder


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was verified: counts of what is sound, and one sentence for each problem."""

    runs: int
    folders: int
    messages: int
    problems: tuple[str, ...]


class Verifying:
    """Reads every column of every row; nothing is written."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def run(self, from_ms: int = 0, to_ms: int | None = None) -> Verified:
        """Verify the runs whose closing times end in [from_ms, to_ms). Raises PipelineError: the archive cannot be read."""
        with translated():
            every, problems = self._archive.readable()
            chosen = [each for each in every if each.before_ms >= from_ms and (to_ms is None or each.before_ms < to_ms)]
            folders = self._archive.verify(chosen)
            problems += [each.complaint for each in folders if each.problem]
            problems += [problem for manifest in chosen for problem in self._lists(manifest)]
            if not problems:  # else a manifest that cannot be read is why its folders are not listed
                unlisted = self._archive.unlisted(each.run for each in every)
                problems += [
                    f"{self._archive.folder.path(name)} belongs to a run without a manifest" for name in unlisted
                ]
        sound = [each for each in folders if not each.problem]
        messages = sum(each.part.messages for each in sound)
        return Verified(runs=len(chosen), folders=len(sound), messages=messages, problems=tuple(problems))

    def _lists(self, manifest: Manifest) -> list[str]:
        """What is wrong with the numbers that the center may remove."""
        if not manifest.messages:
            return []
        found = self._archive.listed(manifest.run)
        return [
            f"{self._archive.folder.path(removal_folder(manifest.run, each.shard))} has {found.get(each.shard, 0)} numbers "
            f"instead of {each.messages}"
            for each in manifest.shards
            if found.get(each.shard, 0) != each.messages
        ]
