"""Verify an archive: every row against its fingerprint, every folder against its manifest, every list against its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import functions as f

from tmc_pipeline.archive.contents import Archive, day_of
from tmc_pipeline.archive.job import DAY_MS
from tmc_pipeline.errors import translated
from tmc_server.domain.manifest import Chain, Partition, removal_folder

_NAMED = 20  # messages, of all that are there more than once


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
        """Verify messages closed on the days of [from_ms, to_ms). Raises PipelineError: the archive cannot be read."""
        first, end = day_of(from_ms), "9999" if to_ms is None else day_of(to_ms + DAY_MS - 1)
        with translated(), self._archive.folder.read_by():
            chain, problems = self._archive.readable()
            chosen = [each for each in chain.partitions if first <= each.place.day < end]
            folders = self._archive.verify(chosen)
            problems += [each.complaint for each in folders if each.problem]
            problems += self._repeated([each.part for each in folders if not each.problem])
            problems += self._lists(chain)
            if not problems:  # else a manifest that cannot be read is why its folders are not listed
                problems += [
                    f"{self._archive.folder.path(name)} belongs to a run without a manifest"
                    for name in self._archive.unlisted(chain)
                ]
        sound = [each for each in folders if not each.problem]
        messages = sum(each.part.messages for each in sound)
        return Verified(
            runs=len({each.place.run for each in chosen}),
            folders=len(sound),
            messages=messages,
            problems=tuple(problems),
        )

    def _repeated(self, parts: Sequence[Partition]) -> list[str]:
        """Return which messages are in the archive more than once; the first of them."""
        rows = (
            self._archive.placed(parts)
            .groupBy("shard", "id")
            .agg(f.count(f.lit(1)).alias("rows"), f.min("topic").alias("topic"))
        )
        repeated = rows.where(f.col("rows") > 1).orderBy("shard", "id").limit(_NAMED).collect()
        return [f"message {row.id} of shard {row.shard}, {row.topic}, is archived {row.rows} times" for row in repeated]

    def _lists(self, chain: Chain) -> list[str]:
        """Return what is wrong with the numbers that the center may remove."""
        folder, problems = self._archive.folder, []
        for each in chain.removals:
            if not folder.exists(f"removal/{each.run}"):
                problems.append(f"{folder.path(f'removal/{each.run}')} is gone")
                continue
            rows = self._archive.listed(f"removal/{each.run}").groupBy("shard").count().collect()
            found = {int(row["shard"]): int(row["count"]) for row in rows}
            problems += [
                f"{folder.path(removal_folder(each.run, shard))} has {found.get(shard, 0)} numbers instead of {count}"
                for shard, count in each.counts.items()
                if found.get(shard, 0) != count
            ]
        return problems
