"""Discrepancies that people have looked at and closed for a while, with who and why. Kept beside the results, never changed."""

from __future__ import annotations

import getpass
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from tmc_pipeline.archive.contents import moment
from tmc_pipeline.errors import CannotRun, translated
from tmc_pipeline.files import HadoopFolder, finished
from tmc_pipeline.reconcile.outlines import noted_number
from tmc_pipeline.reconcile.verdicts import DISCREPANCIES

_FOLDER = "_accepted"
_DAY_MS = 86_400_000


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """One verdict on one row of the details that is not reported until expires_ms. expires_ms 0: it was taken back."""

    number: str
    subscriber: str
    verdict: str
    message_id: str
    reason: str
    by: str
    at_ms: int
    expires_ms: int

    @property
    def explanation(self) -> str:
        """Return what the details say."""
        return (
            f"accepted until {datetime.fromtimestamp(self.expires_ms / 1000, UTC):%Y-%m-%d} by {self.by}: {self.reason}"
        )


class Acceptances:
    """folder: of the results of reconciliations."""

    def __init__(self, spark: SparkSession, folder: HadoopFolder) -> None:
        self._spark = spark
        self._folder = folder

    def valid(self, now_ms: int) -> list[Acceptance]:
        """Return those that have not expired."""
        newest: dict[tuple[str, str, str], Acceptance] = {}
        every = [
            Acceptance(**values)
            for name in self._folder.names(_FOLDER)
            if name.endswith(".json")
            for values in json.loads(self._folder.read(f"{_FOLDER}/{name}"))
        ]
        for each in sorted(every, key=lambda each: each.at_ms):
            newest[each.number, each.subscriber, each.verdict] = each
        return [each for each in newest.values() if each.expires_ms > now_ms]

    def accept(
        self, ids: Sequence[str], verdict: str, reason: str, days: int, now_ms: int
    ) -> tuple[str, list[Acceptance]]:
        """Close discrepancies of the last run: of these messages, or all with this verdict; "": any.

        Returns: the run, and what was closed. Raises CannotRun: the last run has no such discrepancy.
        """
        run, _ = next(finished(self._folder), ("", {}))
        if not run:
            raise CannotRun("There is no reconciliation yet whose discrepancies could be accepted.")
        if verdict and verdict not in DISCREPANCIES:
            raise CannotRun(f"There is no verdict {verdict!r}: they are {', '.join(DISCREPANCIES)}.")
        wanted = f.col("verdict").isin(verdict) if verdict else f.col("verdict").isin(*DISCREPANCIES)
        if ids:
            numbers = [each.split("-", 2)[-1] for each in ids]
            wanted &= f.col("number").isin(numbers) | noted_number("message_id").isin(numbers)
        with translated():
            details = self._spark.read.parquet(self._folder.path(f"{run}/details.parquet"))
            rows = details.where(wanted).select("number", "subscriber", "verdict", "message_id").collect()
        found = {part for row in rows for part in (row.number, row.message_id.split("-", 2)[-1])}
        missing = [each for each in ids if each.split("-", 2)[-1] not in found]
        if missing or not rows:
            what = missing[0] if missing else "discrepancy of that kind"
            raise CannotRun(f"Run {run} reports no {what}: nothing was accepted. Reconcile first.")
        made = [
            Acceptance(
                number=row.number,
                subscriber=row.subscriber,
                verdict=row.verdict,
                message_id=row.message_id,
                reason=reason,
                by=getpass.getuser(),
                at_ms=now_ms,
                expires_ms=now_ms + days * _DAY_MS,
            )
            for row in rows
        ]
        self._keep(made, now_ms)
        return run, made

    def withdraw(self, ids: Sequence[str], reason: str, now_ms: int) -> list[Acceptance]:
        """Report these messages again. Raises CannotRun: one of them is not accepted."""
        numbers = {each.split("-", 2)[-1] for each in ids}
        mine = [
            each
            for each in self.valid(now_ms)
            if each.number in numbers or each.message_id.split("-", 2)[-1] in numbers
        ]
        known = {part for each in mine for part in (each.number, each.message_id.split("-", 2)[-1])}
        missing = [each for each in ids if each.split("-", 2)[-1] not in known]
        if missing:
            raise CannotRun(f"Nothing about {missing[0]} is accepted.")
        made = [replace(each, reason=reason, by=getpass.getuser(), at_ms=now_ms, expires_ms=0) for each in mine]
        self._keep(made, now_ms)
        return made

    def _keep(self, made: Sequence[Acceptance], now_ms: int) -> None:
        name = f"{_FOLDER}/{moment(now_ms)}-{secrets.token_hex(3)}.json"
        self._folder.write(name, json.dumps([asdict(each) for each in made], ensure_ascii=False, indent=1))
