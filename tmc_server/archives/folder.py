"""Removal lists where the pipeline wrote them: a folder of this machine, or an object store through fsspec."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from fsspec.core import url_to_fs

from tmc_common.limited import TooLarge
from tmc_server.domain.manifest import Chain, Manifest, ManifestUnreadable, Removal, current_names, removal_folder
from tmc_server.domain.numbers import MessageNumber, Shard
from tmc_server.domain.ports.retention import ListUnreadable

_MOST_OF_A_MANIFEST = 64 << 20  # one of a checkpoint names every folder of the archive
_MOST_OF_A_LIST = 512 << 20  # whatever its manifest says
_LONGEST_LINE = 21  # a number of 63 bits, and the end of its line
_HADOOP_SCHEMES = {"s3a": "s3", "s3n": "s3", "wasbs": "abfs"}  # as the pipeline spells them -> as fsspec does


class ArchiveFolder:
    """domain.ports.retention.RemovalLists. The same format as tmc_pipeline writes; nothing here needs Spark or Parquet.

    url: a path, or a URL as in pipeline.toml.  center: identity of this center's catalog; the archive of another one is
    unreadable. Raises ValueError: no installed package knows its scheme.
    """

    def __init__(self, url: str, center: str) -> None:
        scheme, separator, rest = url.partition("://")
        if separator:
            url = f"{_HADOOP_SCHEMES.get(scheme, scheme)}://{rest}"
        try:
            # Listings are cached otherwise, and new runs would not be seen.
            self._files, self._root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as exc:
            raise ValueError(f"retention.archive {url}: {exc}") from exc
        self._center = center
        self._known: dict[tuple[str, ...], Manifest] = {}
        self._removals: Mapping[str, Removal] = {}

    def removals(self) -> Sequence[Removal]:
        folder = f"{self._root}/manifests"
        with self._reading(folder, "Is the archive mounted, and has a run published there?"):
            listed = {each["name"].rpartition("/")[2]: each for each in self._files.ls(folder, detail=True)}
        found = {_version(listed[name]): name for name in current_names(list(listed))}
        self._known = {  # they never change, unless another state of the archive is brought back from a backup
            version: self._known.get(version) or self._manifest(f"{folder}/{name}", listed[name])
            for version, name in found.items()
        }
        try:
            chain = Chain.of(list(self._known.values()))
        except ManifestUnreadable as exc:
            raise ListUnreadable(f"{folder}: {exc}") from exc
        if chain.center not in ("", self._center):
            raise ListUnreadable(
                f"{folder} is of another center ({chain.center[:8]}), this is {self._center[:8]}: correct retention.archive"
            )
        self._removals = {each.run: each for each in chain.removals}
        return chain.removals

    def numbers(self, run: str, shard: Shard) -> Sequence[MessageNumber]:
        known = self._removals.get(run)
        expected = known.counts.get(shard, 0) if known is not None else 0
        found = array("q")  # eight bytes each, where a list of ints has forty
        folder = f"{self._root}/{removal_folder(run, shard)}"
        with self._reading(f"The list of run {run}, shard {shard}"):
            for path, about in sorted(self._files.glob(f"{folder}/part-*", detail=True).items()):
                most = min((expected - len(found)) * _LONGEST_LINE, _MOST_OF_A_LIST)
                found.extend(int(line) for line in self._text(path, about, most).split())
        if len(found) != expected:
            raise ListUnreadable(
                f"The list of run {run}, shard {shard} has {len(found)} numbers instead of {expected}."
            )
        return cast("Sequence[MessageNumber]", array("q", sorted(found)))

    def _manifest(self, path: str, about: Mapping[str, Any]) -> Manifest:
        with self._reading(path):
            return Manifest.from_json(self._text(path, about, _MOST_OF_A_MANIFEST), path.rpartition("/")[2])

    def _text(self, path: str, about: Mapping[str, Any], most: int) -> str:
        """about: as the file system lists it.  most: bytes.  Raises TooLarge."""
        size = int(about["size"])
        if size > most:
            raise TooLarge(f"it has {size:,} bytes, and {most:,} are expected at most")
        content: Any = (
            self._files.cat_file(path, start=0, end=size) if size else b""
        )  # of a device, no more than it says
        return str(content.decode())

    @contextmanager
    def _reading(self, what: str, hint: str = "") -> Iterator[None]:
        """Translate errors, of which each backend of fsspec has its own: all mean that nothing of this may be removed."""
        try:
            yield
        except Exception as exc:
            reason = getattr(exc, "strerror", None) or " ".join(f"{exc or type(exc).__name__}".split())
            raise ListUnreadable(f"{what} cannot be read: {reason.rstrip('.')}. {hint}".rstrip()) from exc


def _version(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a file system says of a file that changes when another one takes its place."""
    return tuple(str(about.get(name)) for name in ("name", "size", "ino", "mtime", "LastModified", "ETag"))
