"""How a run changes the archive: files are written to staging, verified, moved, and one manifest makes them count.

Files are never deleted under their final names, unless a published manifest retired them. A run writes its manifest as
an intent, moves its files, and then creates the manifest under the next number. Of two runs that worked at the same
time, one gets the number; the manifest of the winner proves that the other was not published, so that one takes its files
back. An intent without such a manifest is finished by the next run. Files with neither an intent nor a manifest may be the
last copies of messages that the center has removed: a run refuses to write while there are any.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from tmc_pipeline.archive.contents import Archive, moment
from tmc_pipeline.errors import AnotherRun, ArchiveDamaged, JobFailed
from tmc_pipeline.files import HadoopFolder
from tmc_server.domain.manifest import Chain, Manifest, ManifestUnreadable, Place, intent_name, manifest_name

log = logging.getLogger("tmc.pipeline")

_STAGING, _RETIRED = "_staging", "_retired"
_LISTS = ("removal", "open")  # folders by run
_CLOCKS_APART_MS = 3_600_000  # a database's clock may have been set back by so much since the last run
_ABANDONED_MS = 24 * 3_600_000  # where nothing locks, staging of another run may be in use for so long


class Publishing:
    """Runs that write to one archive, one after another. rewriting: the caller keeps readers away already."""

    def __init__(self, archive: Archive, rewriting: bool = False) -> None:
        self._archive = archive
        self._folder = archive.folder
        self._rewriting = rewriting

    @contextmanager
    def run(self, now_ms: int) -> Iterator[Staging]:
        """Clean up after earlier runs and start one. Raises AnotherRun, ArchiveDamaged.

        Its time and name are later than those of all earlier runs, whatever the clock says: the center processes runs
        in the order of their names.
        """
        with self._folder.alone():
            self._finish_others()
            chain = self._archive.chain()
            if self._archive.unlisted_runs(chain):  # or another run has begun to publish since
                self._finish_others()
                chain = self._archive.chain()
            self._refuse_the_unexplained(chain)
            self._refuse_the_future(chain, now_ms)
            self._clean(chain, now_ms)
            at_ms = max(now_ms, chain.written_ms + 1000 if chain.manifests else 0)
            staging = Staging(self._archive, f"{moment(at_ms)}-{secrets.token_hex(3)}", at_ms, chain)
            try:
                yield staging
            except Exception:  # a signal leaves cleaning up to the next run: the JVM may give it another call's answer
                if not self._folder.exists(intent_name(staging.run)):  # else the next run finishes it
                    self._folder.remove(staging.path)
                raise
            self._folder.remove(staging.path)

    def _finish_others(self) -> None:
        """Publish runs that were killed while publishing, or take them back if another run got their number."""
        for name in self._folder.names("intents"):
            if name.endswith(".json"):
                with nullcontext() if self._rewriting else self._folder.read_by(rewriting=True):
                    self._finish(intent_name(name.removesuffix(".json")))

    def _finish(self, intent: str) -> None:
        """Raises ArchiveDamaged: the files of the run are incomplete."""
        try:
            manifest = Manifest.from_json(self._folder.read(intent), intent.rpartition("/")[2])
        except ManifestUnreadable as exc:
            raise ArchiveDamaged(f"{self._folder.path(intent)}: {exc}") from exc
        staging = Staging(self._archive, manifest.run, manifest.written_ms, self._archive.chain())
        owner = staging.owner_of(manifest)
        if owner == manifest.run:  # killed between its last two steps
            staging.settle(manifest)
            return
        wanted = [part.place for part in manifest.partitions]
        if (
            not owner
            and not self._folder.exists(staging.path)
            and not any(self._folder.exists(each.folder) for each in wanted)
        ):
            staging.take_back(manifest)  # none of its messages is left
            return
        try:
            staging.complete(manifest)
        except AnotherRun:
            log.warning("run %s was killed while it published, and another run was published instead", manifest.run)
        else:
            log.warning(
                "published run %s, which was killed while it did so: %d messages", manifest.run, manifest.messages
            )
        self._folder.remove(staging.path)

    def _refuse_the_unexplained(self, chain: Chain) -> None:
        left = self._archive.unlisted_runs(chain)
        if left:
            raise ArchiveDamaged(
                f"{self._folder.path(left[0])} belongs to a run without a manifest ({len(left)} such folders), and may be all "
                "that is left of its messages: bring back the folder manifests from a backup. Nothing was written or deleted."
            )

    def _refuse_the_future(self, chain: Chain, now_ms: int) -> None:
        """Raise ArchiveDamaged if a run ends in the future: later runs would skip messages closed until then."""
        for manifest in chain.manifests:
            counts = manifest.run not in chain.removed and manifest.run != self._archive.gone
            if counts and manifest.before_ms > now_ms + _CLOCKS_APART_MS:
                raise ArchiveDamaged(
                    f"{self._folder.path(manifest.name)} says that closing times before "
                    f"{moment(manifest.before_ms)} are archived, which is in the future: bring it back from a backup, or "
                    "correct the clocks of the databases."
                )

    def _clean(self, chain: Chain, now_ms: int) -> None:
        """Delete unpublished files of earlier runs, and open lists that a newer one replaced."""
        abandoned = moment(now_ms - _ABANDONED_MS)
        for run in self._folder.names(_STAGING):
            if self._folder.is_local or run < abandoned:
                self._folder.remove(f"{_STAGING}/{run}")
        for name in self._folder.names():
            if name.endswith(".unfinished") and self._folder.is_local:  # elsewhere another run may be writing it
                self._folder.remove(name)
        for run in self._folder.names("open"):
            if chain.open is not None and run < chain.open.run:
                self._folder.remove(f"open/{run}")


class Staging:
    """The unpublished files of one run. chain: what was published when it began."""

    def __init__(self, archive: Archive, run: str, at_ms: int, chain: Chain) -> None:
        self._archive = archive
        self._folder = archive.folder
        self.run = run
        self.at_ms = at_ms
        self.chain = chain

    @property
    def path(self) -> str:
        """Relative to the archive."""
        return f"{_STAGING}/{self.run}"

    @property
    def messages(self) -> str:
        """Return where Spark writes the messages, by day and topic."""
        return self._folder.path(f"{self.path}/messages")

    @property
    def lists(self) -> str:
        """Return where Spark writes numbers, by list (removal or open) and shard."""
        return self._folder.path(f"{self.path}/lists")

    def sizes(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Files and bytes by day and topic."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for name, size in self._folder.files(f"{self.path}/messages").items():
            if "/" in name:
                day, topic, _ = name.split("/")
                key = (day.removeprefix("day="), topic.removeprefix("topic="))
                files, total = found.get(key, (0, 0))
                found[key] = (files + 1, total + size)
        return found

    def drop_messages(self) -> None:
        """Delete everything that was written, to write it again."""
        self._folder.remove(f"{self.path}/messages")

    def drop(self, day: str) -> None:
        """Delete the files of one day: they are not for the archive."""
        self._folder.remove(f"{self.path}/messages/day={day}")

    def publish(self, manifest: Manifest) -> Manifest:
        """Write the intent, move the files, create the manifest. Returns: with its number.

        Raises AnotherRun: another one was published meanwhile; nothing of this one was.
        """
        numbered = replace(manifest, number=self.chain.next_number, center=self._archive.owner)
        self._folder.write(intent_name(self.run), numbered.to_json())
        self.complete(numbered)
        return numbered

    def complete(self, manifest: Manifest) -> None:
        """Give the files their final names and create the manifest, or take them back. Raises AnotherRun, ArchiveDamaged.

        Who has the number is asked first: what is being taken back is incomplete, and a run that another one has finished
        meanwhile is published.
        """
        name = manifest_name(manifest.number)
        owner = self.owner_of(manifest)
        if not owner:
            try:
                self.move()
                self._refuse_the_incomplete(manifest)
                self._folder.create(name, manifest.to_json())
            except (ArchiveDamaged, JobFailed):
                if not self.owner_of(manifest):
                    raise  # else the next run has already finished this one, or takes its files back
            owner = self.owner_of(manifest)
        if owner != self.run:
            self.take_back(manifest)
            raise AnotherRun(
                f"Another run published {self._folder.path(name)} while this one worked. Nothing of this one was "
                "published: run it again."
            )
        self.settle(manifest)

    def settle(self, manifest: Manifest) -> None:
        """Do what is left to do after the manifest was published."""
        self._retire(manifest.retired)
        if manifest.erased:  # also from what was compacted just before
            for path in retired_before(self._folder, manifest.written_ms + _ABANDONED_MS):
                self._folder.remove(path)
        self._folder.remove(intent_name(self.run))

    def _refuse_the_incomplete(self, manifest: Manifest) -> None:
        """Raise ArchiveDamaged if files or lists are gone: a run may have been killed, or its staging deleted."""
        for part in manifest.partitions:
            folder = self._archive.compared(part)
            if folder.problem:
                raise ArchiveDamaged(
                    f"Run {manifest.run} cannot be published: {folder.path} {folder.problem}. Bring it back from a backup."
                )
        for each in manifest.shards:
            if not self._folder.exists(f"removal/{manifest.run}/shard={each.shard}"):
                raise ArchiveDamaged(
                    f"Run {manifest.run} cannot be published: removal/{manifest.run} is incomplete. Bring it back from a backup."
                )

    def owner_of(self, manifest: Manifest) -> str:
        """The run that has this number, perhaps this one, finished by another; "": none. Raises ArchiveDamaged."""
        name = manifest_name(manifest.number)
        names = self._folder.names("manifests")
        if any("checkpoint" in each and each[:8] >= f"{manifest.number:08d}" for each in names):
            chain = (
                self._archive.chain()
            )  # what a checkpoint stands for may be deleted, but it lists what they published
            known = {part.place.run for part in chain.partitions} | {each.run for each in chain.removals}
            known |= {chain.open.run} if chain.open is not None else set()
            return self.run if self.run in known else "another"
        if not self._folder.exists(name):
            return ""
        try:
            return Manifest.from_json(self._folder.read(name), name.rpartition("/")[2]).run
        except ManifestUnreadable as exc:
            raise ArchiveDamaged(f"{self._folder.path(name)}: {exc} Bring it back from a backup.") from exc

    def take_back(self, manifest: Manifest) -> None:
        """Undo `move`: this run can no longer be published. Repeated if it was interrupted, since the intent goes last."""
        for part in manifest.partitions:
            self._folder.remove(part.place.folder)
        for name in _LISTS:
            self._folder.remove(f"{name}/{self.run}")
        self._folder.remove(intent_name(self.run))

    def move(self) -> None:
        """Move files and lists from staging to their final names; those that were moved before are skipped."""
        moves = {}
        for name in self._folder.files(f"{self.path}/messages"):
            if "/" in name:  # else _SUCCESS
                place, _, file = name.rpartition("/")
                moves[f"{self.path}/messages/{name}"] = f"messages/{place}/run={self.run}/{file}"
        for name in self._folder.files(f"{self.path}/lists"):
            if "/" in name:
                which, _, rest = name.removeprefix("list=").partition("/")
                moves[f"{self.path}/lists/{name}"] = f"{which}/{self.run}/{rest}"
        self._folder.move(moves)

    def _retire(self, places: tuple[Place, ...]) -> None:
        """Move folders that this run retired out of sight of other tools that read the archive as a table."""
        moves = {}
        for place in places:
            for name in self._folder.files(place.folder):
                moves[f"{place.folder}/{name}"] = f"{_RETIRED}/{self.run}/{place.folder}/{name}"
        self._folder.move(moves)
        for place in places:
            self._folder.remove(place.folder)


def retired_before(folder: HadoopFolder, ms: int) -> list[str]:
    """Folders with files that runs before this time (epoch ms) retired."""
    return [f"{_RETIRED}/{run}" for run in folder.names(_RETIRED) if run < moment(ms)]
