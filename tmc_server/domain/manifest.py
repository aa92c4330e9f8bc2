"""What the archive contains: the contract between the pipeline, which writes it, and the retention duty.

Every run that changes the archive publishes one manifest, numbered in sequence. It appears under its final name only when
everything it lists was written, read back and compared, and two runs cannot publish the same number. A checkpoint stands for
all manifests up to its number. Beside them lie lists of message numbers, one folder per run and shard, which say exactly
what the center may remove.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tmc_server.domain.numbers import Shard

FORMAT = 1
_NEWER = "This manifest was written by a newer version: update this one."
_CHECKPOINT = ".checkpoint"
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
_TOPIC = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)


class ManifestUnreadable(Exception):
    """The text is no manifest, or one of a newer format."""


def _demand(pattern: re.Pattern[str], text: str) -> None:
    """Refuse what is no part of a path: anyone with write access to the archive may have written it. Raises ValueError."""
    if not pattern.fullmatch(text):
        raise ValueError(f"{text[:100]!r} is no part of a path")


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
class Place:
    """A folder of message files. day: of closing."""

    run: str
    day: str
    topic: str

    def __post_init__(self) -> None:
        for pattern, text in ((_RUN, self.run), (_DAY, self.day), (_TOPIC, self.topic)):
            _demand(pattern, text)

    @property
    def folder(self) -> str:
        """Return its path inside an archive."""
        return f"messages/day={self.day}/topic={self.topic}/run={self.run}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The content of one folder. digest: over all columns of its rows, hexadecimal.  files, bytes: of its Parquet files."""

    place: Place
    messages: int
    digest: str
    files: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    """A message whose content was erased, by request. message_id: its public id.  at_ms: when."""

    message_id: str
    at_ms: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedRun:
    """A run that no longer counts: it went in wrongly, or its files are gone for good. at_ms: since when."""

    run: str
    at_ms: int
    reason: str

    def __post_init__(self) -> None:
        _demand(_RUN, self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewinding:
    """The center was restored as of since_ms, and what closed later and is in its tables again was taken out. at_ms: when."""

    since_ms: int
    at_ms: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Which messages the center may remove because this run archived them: counts by shard; the numbers are in lists."""

    run: str
    before_ms: int
    counts: Mapping[Shard, int]

    def __post_init__(self) -> None:
        _demand(_RUN, self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMessages:
    """What a run saw and did not archive yet: counts by shard; the numbers are in lists, one folder per shard.

    before_ms: messages that were prepared later are not in the lists; the next run looks at all of those anyway.
    """

    run: str
    before_ms: int
    counts: Mapping[Shard, int]

    def __post_init__(self) -> None:
        _demand(_RUN, self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one run published, or, as a checkpoint, what all runs up to this number did.

    number: in sequence, from 1; 0: not known yet.  since_ms <= time of preparing, or earlier and open till now.
    before_ms: every message closed before this time is archived.  written_ms: when.
    partitions: folders of this run; in a checkpoint, of all runs, without the retired ones.
    retired: folders of earlier runs that are no longer part of the archive: compacted, expired, or rewritten.
    expired: by topic, the last day whose messages are no longer part of the archive.
    pending: of a checkpoint: removals that the retention duty had not worked off.
    names: topics, apps, subscriptions by number.
    center: identity of the center's catalog database; "": written before manifests named it.
    removed: runs that do not count any more.  rewound: a record, of each time the center was restored.
    """

    run: str
    since_ms: int
    before_ms: int
    written_ms: int
    names: Mapping[str, Mapping[str, Sequence[str] | str]]
    shards: tuple[ArchivedShard, ...] = ()
    partitions: tuple[Partition, ...] = ()
    number: int = 0
    checkpoint: bool = False
    retired: tuple[Place, ...] = ()
    open: OpenMessages | None = None
    erased: tuple[Erasure, ...] = ()
    expired: Mapping[str, str] = field(default_factory=dict)
    pending: tuple[Removal, ...] = ()
    center: str = ""
    removed: tuple[RemovedRun, ...] = ()
    rewound: tuple[Rewinding, ...] = ()

    def __post_init__(self) -> None:
        _demand(_RUN, self.run)

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self.shards)

    @property
    def consumptions(self) -> int:
        return sum(each.consumptions for each in self.shards)

    @property
    def removals(self) -> tuple[Removal, ...]:
        if self.checkpoint:
            return self.pending
        counts = {each.shard: each.messages for each in self.shards}
        return (Removal(run=self.run, before_ms=self.before_ms, counts=counts),) if counts else ()

    @property
    def name(self) -> str:
        """The path of its file inside an archive."""
        return manifest_name(self.number, self.checkpoint)

    def to_json(self) -> str:
        values = {"format": FORMAT, **asdict(self)}
        values["partitions"] = [{**part.pop("place"), **part} for part in values["partitions"]]
        values = json.loads(json.dumps(values))  # keys of mappings are text, as they will be read
        return json.dumps({**values, "checksum": _checksum(values)}, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, name: str) -> Manifest:
        """Read a manifest. name: of its file, without its folder. Raises ManifestUnreadable: also when it was edited, or is
        that of another file."""
        try:
            values = json.loads(text)
            checksum, version = values.pop("checksum", None), values["format"]
            if version > FORMAT:
                raise ManifestUnreadable(_NEWER)
            if checksum != _checksum(values):
                raise ManifestUnreadable("It was edited or damaged after it was published: its checksum differs.")
            del values["format"]
            listed = values.pop("open")
            partitions = tuple(
                Partition(place=Place(run=part.pop("run"), day=part.pop("day"), topic=part.pop("topic")), **part)
                for part in values.pop("partitions")
            )
            found = cls(
                shards=tuple(ArchivedShard(**each) for each in values.pop("shards")),
                partitions=partitions,
                retired=tuple(Place(**each) for each in values.pop("retired")),
                open=OpenMessages(**{**listed, "counts": _by_shard(listed["counts"])}) if listed else None,
                erased=tuple(Erasure(**each) for each in values.pop("erased")),
                pending=tuple(
                    Removal(**{**each, "counts": _by_shard(each["counts"])}) for each in values.pop("pending")
                ),
                removed=tuple(RemovedRun(**each) for each in values.pop("removed", ())),
                rewound=tuple(Rewinding(**each) for each in values.pop("rewound", ())),
                **values,
            )
            if found.name.rpartition("/")[2] != name and intent_name(found.run).rpartition("/")[2] != name:
                raise ManifestUnreadable(f"It is the manifest of run {found.run}, copied under another name.")
            return found
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise ManifestUnreadable(f"This is no manifest: {exc}.") from exc


def _by_shard(counts: Mapping[str, int]) -> dict[Shard, int]:
    return {Shard(int(shard)): count for shard, count in counts.items()}


def _checksum(values: Mapping[str, object]) -> str:
    """SHA-256 over the values in one fixed order, hexadecimal: finds damage and careless edits, not a forger."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def manifest_name(number: int, checkpoint: bool = False) -> str:
    """Path of a manifest inside an archive."""
    return f"manifests/{number:08d}{_CHECKPOINT if checkpoint else ''}.json"


def current_names(names: Sequence[str]) -> list[str]:
    """Names of manifest files that count: the newest checkpoint, and what it does not stand for. Others may be deleted."""
    files = sorted(name for name in names if name.endswith(".json"))
    checkpoint = max((name for name in files if _CHECKPOINT in name), default="")
    if not checkpoint:
        return files
    number = checkpoint.partition(".")[0]
    after = [name for name in files if re.fullmatch(r"\d{8}\.json", name) and name > f"{number}.json"]
    return [checkpoint, *after]


def intent_name(run: str) -> str:
    """Path of a manifest before it is published."""
    return f"intents/{run}.json"


def removal_folder(run: str, shard: Shard) -> str:
    """Path of the folder with the message numbers of one shard, one in a line, inside an archive."""
    return f"removal/{run}/shard={shard}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """All manifests of an archive, oldest first: a checkpoint or none, then one number after another."""

    manifests: tuple[Manifest, ...]

    @classmethod
    def of(cls, found: Sequence[Manifest]) -> Chain:
        """Drop what a checkpoint stands for, and sort. Raises ManifestUnreadable: one is missing."""
        newest = max((each for each in found if each.checkpoint), key=lambda each: each.number, default=None)
        first = newest.number if newest is not None else 0
        numbered = sorted(
            (each for each in found if each.number > first and not each.checkpoint), key=lambda each: each.number
        )
        for expected, each in enumerate(numbered, start=first + 1):
            if each.number != expected:
                raise ManifestUnreadable(f"{manifest_name(expected)} is missing: bring it back from a backup.")
        return cls(manifests=(*((newest,) if newest is not None else ()), *numbered))

    @property
    def next_number(self) -> int:
        return max((each.number for each in self.manifests), default=0) + 1

    @property
    def center(self) -> str:
        """Return the identity of the center that it belongs to; "": nobody wrote it down."""
        return next((each.center for each in self.manifests if each.center and each.run not in self.removed), "")

    @property
    def removed(self) -> dict[str, RemovedRun]:
        """Return the runs that do not count any more, by their names."""
        return {each.run: each for manifest in self.manifests for each in manifest.removed}

    def explains(self, run: str) -> bool:
        """Return whether a run of that name was published here, as far as a checkpoint still tells, or removed."""
        covered = max((each.run for each in self.manifests if each.checkpoint), default="")
        return run <= covered or run in self.removed or any(each.run == run for each in self.manifests)

    @property
    def removals(self) -> list[Removal]:
        """Return them in the order of their runs."""
        found = (each for manifest in self.manifests for each in manifest.removals if each.run not in self.removed)
        return sorted(found, key=lambda each: each.run)

    @property
    def _archiving(self) -> list[Manifest]:
        """Return the manifests of runs that archived, and still count."""
        return [each for each in self.manifests if each.before_ms and each.run not in self.removed]

    @property
    def before_ms(self) -> int:
        """Return the time before which every closed message is archived; 0: nothing is."""
        return max((each.before_ms for each in self._archiving), default=0)

    @property
    def written_ms(self) -> int:
        return max((each.written_ms for each in self.manifests), default=0)

    @property
    def open(self) -> OpenMessages | None:
        """The messages that the newest archive run left open; None: no run has archived yet."""
        ran = self._archiving
        return ran[-1].open if ran else None

    @property
    def partitions(self) -> list[Partition]:
        """The folders that make up the archive now."""
        retired = {place for each in self.manifests for place in each.retired}
        return [part for each in self.manifests for part in each.partitions if part.place not in retired]

    @property
    def names(self) -> Mapping[str, Mapping[str, Sequence[str] | str]]:
        """Topics, apps and subscriptions by number; newer runs take precedence."""
        merged: dict[str, dict[str, Sequence[str] | str]] = {"topics": {}, "apps": {}, "subscriptions": {}}
        for manifest in self.manifests:
            for kind, names in manifest.names.items():
                merged.setdefault(kind, {}).update(names)
        return merged

    @property
    def expired(self) -> dict[str, str]:
        """Return, by topic, the last day that was taken out."""
        merged: dict[str, str] = {}
        for manifest in self.manifests:
            for topic, day in manifest.expired.items():
                merged[topic] = max(day, merged.get(topic, ""))
        return merged

    @property
    def erased(self) -> list[Erasure]:
        """Return every erasure, oldest first."""
        return [each for manifest in self.manifests for each in manifest.erased]
