"""`tmc pipeline`: archive, restore, reconcile, report. Spark is imported when a job begins, not before."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tmc_pipeline.errors import CannotRun, PipelineError, translated
from tmc_pipeline.runs import Figures, figures, tell_progress
from tmc_pipeline.settings import Settings, load
from tmc_server.settings import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tmc_pipeline.archive.contents import Archive
    from tmc_pipeline.archive.rewriting import Rewriting
    from tmc_pipeline.center import CenterTables
    from tmc_pipeline.reconcile.accepted import Acceptances

app = typer.Typer(
    no_args_is_help=True,
    help="Archive closed messages, restore them, reconcile ledgers, report. Runs on Spark and only reads the databases.",
)
ConfigFile = Annotated[str, typer.Option("--config", "-c", help="pipeline.toml; docs/pipeline.md lists its keys")]
Master = Annotated[str, typer.Option(help="overrides spark.master: local[2], spark://host:7077")]
Profile = Annotated[str, typer.Option(help="overrides spark.profile: polite or fast")]
Wait = Annotated[float, typer.Option(min=0, help="minutes to wait for another run that uses the same folder")]
Reason = Annotated[str, typer.Option(help="kept in the archive, for the record")]
SkipMissing = Annotated[bool, typer.Option("--skip-missing", help="continue without archive folders that are missing")]

_WEEK_MS = 7 * 86_400_000


@dataclass(kw_only=True)
class Job:
    """Settings, Spark session and figures of a running job."""

    settings: Settings
    spark: SparkSession
    figures: Figures
    wait_s: float = 0

    @property
    def center(self) -> CenterTables:
        from tmc_pipeline.center import CenterTables, databases_of
        from tmc_pipeline.session import FETCH, OPENING

        wanted = self.settings.spark
        return CenterTables(
            self.spark,
            databases_of(self.settings.store),
            FETCH[wanted.profile],
            OPENING[wanted.profile],
            wanted.body_bytes,
        )

    @property
    def archive(self) -> Archive:
        """The one that is configured."""
        from tmc_pipeline.archive.contents import Archive

        return Archive(self.spark, self.settings.archive.path, self.center, wait_s=self.wait_s)

    @property
    def rewriting(self) -> Rewriting:
        from tmc_pipeline.archive.rewriting import Rewriting

        return Rewriting(self.spark, self.center, self.archive)


def _needs_archive(settings: Settings) -> None:
    """Raises CannotRun: none is configured."""
    if not settings.archive.path:
        raise CannotRun("No archive is configured: set [archive] path to a folder or URL that every worker reaches.")


def _needs_rules(settings: Settings) -> None:
    """Raises CannotRun: no archive is configured, or nothing of it expires."""
    _needs_archive(settings)
    rules = settings.archive
    if not rules.keep_days and not any(rules.keep_days_of.values()):
        raise CannotRun("No rule says what expires: set archive.keep_days or archive.keep_days_of.")


@contextmanager
def _job(
    name: str,
    config: str,
    master: str,
    profile: str,
    wait_minutes: float = 0,
    needs: Callable[[Settings], None] = lambda _: None,
) -> Iterator[Job]:
    """Settings, session and figures of one run. needs: raises CannotRun unless the settings are enough."""
    from tmc_pipeline.session import session

    with _refusals(name), _terminations():
        settings = _overridden(load(config), master, profile)
        tell_progress()
        with figures(settings.metrics.textfile, name) as kept:
            needs(settings)
            with session(settings.spark, _families(settings), name) as spark:
                yield Job(settings=settings, spark=spark, figures=kept, wait_s=wait_minutes * 60)


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Turn every error into one line and exit code 2."""
    try:
        yield
    except (PipelineError, ConfigError) as exc:
        _end(name, str(exc), exc)
    except (_Terminated, KeyboardInterrupt) as exc:
        _end(name, "stopped by a signal. This run publishes nothing more: run it again.", exc)
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as exc:  # noqa: BLE001 - exit code 1 is a verdict: an unexpected error must not look like one
        text = " ".join(f"{type(exc).__name__}: {exc}".split())
        _end(name, f"unexpected: {text[:300]}. Set TMC_PIPELINE_TRACE=1 to see the traceback.", exc)


def _end(name: str, text: str, error: BaseException) -> NoReturn:
    if os.environ.get("TMC_PIPELINE_TRACE"):
        traceback.print_exception(error)
    typer.echo(f"tmc pipeline {name}: {text}", err=True)
    raise typer.Exit(2) from error


class _Terminated(BaseException):
    """SIGTERM was received. A BaseException, so that no `except Exception` on the way catches it."""


@contextmanager
def _terminations() -> Iterator[None]:
    """End the job on SIGTERM as on an error: one line, and the figures say that it did not succeed.

    The signal interrupts a call to the JVM, and the next call then gets its answer: later errors mean nothing.
    """
    came = False

    def stop(*_: object) -> None:
        nonlocal came
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the end is under way
        came = True
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Exception as exc:
        if came:
            raise _Terminated from exc
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _overridden(settings: Settings, master: str, profile: str) -> Settings:
    if profile and profile not in ("polite", "fast"):
        raise ConfigError(f"--profile {profile}: give polite or fast.")
    changes = {name: value for name, value in (("master", master), ("profile", profile)) if value}
    return settings.model_copy(update={"spark": settings.spark.model_copy(update=changes)})


def _families(settings: Settings) -> set[str]:
    """Return the families of every database that may be read, the center's and the ledgers'."""
    from tmc_pipeline.center import databases_of
    from tmc_pipeline.dialects import database

    ledgers = [each.url.get_secret_value() for each in (*settings.producers, *settings.consumers)]
    return {place.family for place in databases_of(settings.store).each} | {
        database(url).family for url in ledgers if url
    }


archiving = typer.Typer(
    invoke_without_command=True, help="Copy closed messages to Parquet; verify, compact, expire, erase."
)
app.add_typer(archiving, name="archive")


@archiving.callback()
def archive(
    context: typer.Context,
    config: ConfigFile = "",
    everything: Annotated[
        bool, typer.Option("--everything", help="look at all messages, not only at recent and open ones")
    ] = False,
    wait: Wait = 0,
    master: Master = "",
    profile: Profile = "",
) -> None:
    """Copy closed messages with their consumptions to Parquet, verify, publish. Removes nothing."""
    if context.invoked_subcommand is not None:
        return
    _config_given(config)
    with _job("archive", config, master, profile, wait, _needs_archive) as job:
        from tmc_pipeline.archive.job import HOUR_MS, Archiving

        wanted = job.settings.archive
        lag_ms, lookback_ms = round(wanted.lag_minutes * 60_000), round(wanted.lookback_hours * HOUR_MS)
        manifest = Archiving(job.spark, job.center, job.archive, lag_ms, lookback_ms).run(everything)
        job.figures.set("archived_messages", "messages of the last archive run", manifest.messages)
        job.figures.set("archived_consumptions", "consumptions of the last archive run", manifest.consumptions)
        job.figures.set(
            "archived_before_timestamp_seconds", "closing times before this are archived", manifest.before_ms / 1000
        )
        typer.echo(f"run {manifest.run}: {manifest.messages} messages, {manifest.consumptions} consumptions")


@archiving.command()
def verify(
    config: ConfigFile,
    since: Annotated[str, typer.Option(help="messages closed on this day or later, UTC: 2026-11-21; empty: all")] = "",
    until: Annotated[str, typer.Option(help="and before this day")] = "",
    wait: Wait = 0,
    master: Master = "",
    profile: Profile = "",
) -> None:
    """Read archived messages and compare them with the manifests; exit code 1 when something is damaged."""
    with _refusals("archive verify"):
        from_ms, to_ms = _moment("--since", since), _moment("--until", until)
    with _job("archive_verify", config, master, profile, wait, _needs_archive) as job:
        from tmc_pipeline.archive.verify import Verifying

        found = Verifying(job.archive).run(from_ms or 0, to_ms)
        job.figures.set("verified_messages", "messages of the last verification that are as archived", found.messages)
        job.figures.set("damaged_folders", "what the last verification found", len(found.problems))
        for problem in found.problems:
            typer.echo(f"DAMAGED {problem}")
        typer.echo(f"{found.runs} runs, {found.folders} folders, {found.messages} messages are as they were archived")
    if found.problems:
        raise typer.Exit(1)


@archiving.command()
def compact(config: ConfigFile, wait: Wait = 0, master: Master = "", profile: Profile = "") -> None:
    """Merge the files of finished days, one per day, topic and archive.file_megabytes, and many manifests into one."""
    with _job("archive_compact", config, master, profile, wait, _needs_archive) as job:
        done = job.rewriting.compact(job.settings.archive.file_megabytes << 20)
        typer.echo(f"{done.before} folders became {done.after}, with {done.messages} messages")


@archiving.command()
def expire(config: ConfigFile, wait: Wait = 0, master: Master = "", profile: Profile = "") -> None:
    """Remove days that are older than archive.keep_days or archive.keep_days_of."""
    with _job("archive_expire", config, master, profile, wait, _needs_rules) as job:
        rules = job.settings.archive
        done = job.rewriting.expire(rules.keep_days, rules.keep_days_of)
        typer.echo(f"{done.before} folders expired, with {done.messages} messages")


@archiving.command()
def erase(
    config: ConfigFile,
    ids: Annotated[list[str], typer.Argument(help="message ids")],
    reason: Reason,
    wait: Wait = 0,
    master: Master = "",
    profile: Profile = "",
) -> None:
    """Delete key, body, headers and error texts of messages for good; their numbers, times and states stay."""
    with _job("archive_erase", config, master, profile, wait, _needs_archive) as job:
        from tmc_pipeline.archive.restore import wanted_ids

        done = job.rewriting.erase(wanted_ids(ids), reason)
        typer.echo(f"erased the content of {done.messages} messages, in {done.before} folders")


@archiving.command("remove-run")
def remove_run(
    config: ConfigFile,
    run: Annotated[str, typer.Argument(help="its name, as the job printed it: 20261121T053000-1f2e3d")],
    reason: Reason,
    wait: Wait = 0,
    master: Master = "",
    profile: Profile = "",
) -> None:
    """Take a run out that went in wrongly, or record that one is gone for good; what its messages were is then unknown."""
    with _job("archive_remove_run", config, master, profile, wait, _needs_archive) as job:
        done = job.rewriting.remove_run(run, reason)
        typer.echo(
            f"run {run} does not count any more: {done.before} folders with {done.messages} messages were removed"
        )


@archiving.command()
def rewind(
    config: ConfigFile,
    since: Annotated[str, typer.Option(help="the time of the backup that the center was restored from, UTC")],
    reason: Reason,
    wait: Wait = 0,
    master: Master = "",
    profile: Profile = "",
) -> None:
    """Take out messages that are open again in a center that was restored from a backup. Archive everything next."""
    with _refusals("archive rewind"):
        since_ms = _moment("--since", since)
    with _job("archive_rewind", config, master, profile, wait, _needs_archive) as job:
        done = job.rewriting.rewind(since_ms or 0, reason)
        typer.echo(f"{done.messages} messages were taken out: run tmc pipeline archive --everything")


@app.command()
def restore(
    config: ConfigFile,
    ids: Annotated[list[str] | None, typer.Argument(help="message ids")] = None,
    topic: Annotated[str, typer.Option(help="instead of ids: the topic, with --key")] = "",
    key: Annotated[str, typer.Option(help="instead of ids: the message key, with --topic")] = "",
    replay: Annotated[
        bool, typer.Option("--replay", help="publish them again, as new messages of their producer")
    ] = False,
    address: Annotated[str, typer.Option(envvar="TMC_ADDRESS", help="of the center, for --replay")] = "127.0.0.1:50051",
    app_key: Annotated[str, typer.Option(envvar="TMC_APP_KEY", help="of the producer, for --replay")] = "",
    token: Annotated[str, typer.Option(envvar="TMC_ADMIN_TOKEN", help="of an operator, for --replay")] = "",
    authority: Annotated[
        str, typer.Option(envvar="TMC_CA", help="PEM file: use TLS and trust this authority, for --replay")
    ] = "",
    skip_missing: SkipMissing = False,
    wait: Wait = 0,
    master: Master = "",
    profile: Profile = "",
) -> None:
    """Print archived messages, one JSON line each; exit code 1 if one of them is not archived, and then none is replayed."""
    with _refusals("restore"):
        if bool(ids) == bool(topic and key):
            raise CannotRun("Say which: message ids, or --topic and --key.")
    with _job("restore", config, master, profile, wait, _needs_archive) as job:
        from tmc_pipeline.archive.restore import Restoring, wanted_ids

        restoring = Restoring(job.archive, skip_missing)
        wanted = wanted_ids(ids or ())
        found = list(restoring.by_id(wanted) if ids else restoring.by_key(topic, key))
        for message in found:
            typer.echo(json.dumps(message, ensure_ascii=False))
        missing = sorted(set(map(str, wanted)) - {message["id"] for message in found})
        if replay and not missing:
            _replay(found, address, app_key, authority, token)
    if missing and found:
        typer.echo(f"Not archived: {', '.join(missing)}.{' Nothing was replayed.' if replay else ''}", err=True)
    elif not found:
        typer.echo("No archived message was found.", err=True)
    if missing or not found:
        raise typer.Exit(1)


@app.command()
def reconcile(
    config: ConfigFile,
    since: Annotated[
        str,
        typer.Option(
            help="messages prepared at or after this time, UTC, and what the last run left open; last: where that one "
            "ended; empty: everything"
        ),
    ] = "",
    until: Annotated[str, typer.Option(help="messages prepared before this time; empty: all")] = "",
    skip_missing: SkipMissing = False,
    wait: Wait = 0,
    master: Master = "",
    profile: Profile = "",
) -> None:
    """Compare ledgers, center and inboxes; exit code 1 when they do not agree. Writes details and a summary."""
    with _refusals("reconcile"):
        from_ms, to_ms = since if since == "last" else _moment("--since", since), _moment("--until", until)
    with _job("reconcile", config, master, profile, wait) as job:
        from tmc_pipeline.files import HadoopFolder, remove_old_runs
        from tmc_pipeline.reconcile.job import Reconciliation
        from tmc_pipeline.reconcile.ledgers import Ledgers
        from tmc_pipeline.session import FETCH, OPENING

        settings = job.settings
        folder = HadoopFolder(job.spark, settings.reconcile.path)
        summary = Reconciliation(
            spark=job.spark,
            center=job.center,
            archive=job.archive if settings.archive.path else None,
            ledgers=Ledgers(job.spark, FETCH[settings.spark.profile], OPENING[settings.spark.profile]),
            folder=folder,
            tolerance_ms=round(settings.reconcile.tolerance_minutes * 60_000),
            skip_missing=skip_missing,
        ).run(settings.producers, settings.consumers, from_ms, to_ms)
        for verdict, count in summary.verdicts.items():
            job.figures.set("messages", "messages of the last reconciliation", count, verdict=verdict)
            typer.echo(f"{verdict:24}{count:12}")
        for each in summary.relations:
            numbers = " ".join(f"{name}={each[name]}" for name in ("committed", "consumed", "unconfirmed", "open"))
            typer.echo(f"{'ok ' if each['holds'] else 'BAD'} {each['topic']} -> {each['subscriber']}: {numbers}")
        typer.echo(f"details: {summary.path}")
        remove_old_runs(folder, job.center.now_ms(), settings.reconcile.keep_days)
    if not summary.consistent:
        raise typer.Exit(1)


@app.command()
def accept(
    config: ConfigFile,
    reason: Annotated[str, typer.Option(help="why it is closed; kept with who and when")],
    ids: Annotated[
        list[str] | None, typer.Argument(help="message ids of discrepancies of the last reconciliation")
    ] = None,
    verdict: Annotated[str, typer.Option(help="only this verdict; without ids, all messages that have it: lost")] = "",
    days: Annotated[int, typer.Option(min=1, max=3650, help="number of days until it is reported again")] = 90,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="report these messages again at once")] = False,
    master: Master = "",
) -> None:
    """Close discrepancies that somebody has looked at: reconciliations count them apart until this expires."""
    with _refusals("accept"):
        if not ids and (withdraw or not verdict):
            raise CannotRun("Say which: message ids, or --verdict.")
    with _job("accept", config, master, "") as job:
        acceptances = _acceptances(job)
        now_ms = time.time_ns() // 1_000_000
        if withdraw:
            made = acceptances.withdraw(ids or [], reason, now_ms)
            typer.echo(f"{len(made)} are reported again")
        else:
            run, made = acceptances.accept(ids or [], verdict, reason, days, now_ms)
            typer.echo(f"{len(made)} of run {run} are closed for {days} days")
        for each in made:
            typer.echo(f"{each.message_id} {each.subscriber or '-'}: {each.verdict}")


@app.command()
def accepted(config: ConfigFile, master: Master = "") -> None:
    """List the discrepancies that are closed, one JSON line each."""
    with _job("accepted", config, master, "") as job:
        for each in _acceptances(job).valid(time.time_ns() // 1_000_000):
            typer.echo(json.dumps(asdict(each), ensure_ascii=False))


def _acceptances(job: Job) -> Acceptances:
    from tmc_pipeline.files import HadoopFolder
    from tmc_pipeline.reconcile.accepted import Acceptances

    return Acceptances(job.spark, HadoopFolder(job.spark, job.settings.reconcile.path))


@app.command()
def report(
    config: ConfigFile,
    since: Annotated[
        str,
        typer.Option(
            help="messages prepared at or after this time, UTC: 2026-11-21 or 2026-11-21T08:00; empty: a week ago"
        ),
    ] = "",
    until: Annotated[str, typer.Option(help="and before this time; empty: now")] = "",
    skip_missing: SkipMissing = False,
    wait: Wait = 0,
    master: Master = "",
    profile: Profile = "",
) -> None:
    """Write one HTML page and Parquet tables: volumes, latencies, attempts, failures, what is open, verdicts, skew."""
    with _refusals("report"):
        from_ms, to_ms = _moment("--since", since), _moment("--until", until)
    with _job("report", config, master, profile, wait) as job:
        from tmc_pipeline.files import HadoopFolder, remove_old_runs
        from tmc_pipeline.report.job import Report

        settings = job.settings
        folder = HadoopFolder(job.spark, settings.report.path)
        made = Report(
            job.spark,
            job.center,
            archive=job.archive if settings.archive.path else None,
            folder=folder,
            skip_missing=skip_missing,
            reconciled=HadoopFolder(job.spark, settings.reconcile.path),
            console=settings.report.console,
        ).run(from_ms if from_ms is not None else job.center.now_ms() - _WEEK_MS, to_ms)
        job.figures.set("reported_messages", "messages of the last report", made.messages)
        typer.echo(f"{made.path}/report.html")
        remove_old_runs(folder, job.center.now_ms(), settings.report.keep_days)


@app.command("share-classes")
def share_classes(config: ConfigFile) -> None:
    """Store Spark's classes, once per machine and user, as Java maps them into memory. Jobs then start 2 to 3 s sooner."""
    from tmc_pipeline.classes import NewClasses
    from tmc_pipeline.session import check_java, session

    with _refusals("share-classes"), _terminations(), NewClasses(check_java()) as classes:
        settings = _overridden(load(config), "local[1]", "")  # a cluster uses the same classes
        with session(settings.spark, _families(settings), "share-classes", classes) as spark:
            with translated():
                _use_spark(Job(settings=settings, spark=spark, figures=Figures()), f"file://{classes.folder}")
            classes.finish(spark)
        typer.echo(f"{classes.target}: {classes.target.stat().st_size >> 20} MB")


def _use_spark(job: Job, folder: str) -> None:
    """Load the classes that jobs need: a reconciliation, a write and a read of what is in the tables since now."""
    from tmc_pipeline.center import MessageRange
    from tmc_pipeline.files import HadoopFolder
    from tmc_pipeline.reconcile.job import Reconciliation
    from tmc_pipeline.reconcile.ledgers import Ledgers

    job.center.check()
    now = job.center.now_ms()
    messages = job.center.messages(MessageRange(from_ms=now))
    messages.write.partitionBy("state").parquet(f"{folder}/messages")
    job.spark.read.schema(messages.schema).parquet(f"{folder}/messages").groupBy("state").count().collect()
    Reconciliation(
        spark=job.spark,
        center=job.center,
        archive=None,
        ledgers=Ledgers(job.spark, fetch=1),
        folder=HadoopFolder(job.spark, folder),
        tolerance_ms=0,
    ).run([], [], since=now)


def _config_given(config: str) -> None:
    """Require --config: options of a command group cannot be required, or its commands would have to repeat them."""
    if not config:
        raise typer.BadParameter("missing", param_hint="--config")


def _moment(option: str, text: str) -> int | None:
    """Epoch milliseconds; None: nothing was given. Raises CannotRun."""
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
        return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
    except ValueError as exc:
        raise CannotRun(f"{option} {text}: give a time as 2026-11-21 or 2026-11-21T08:00, in UTC.") from exc


def _replay(messages: list[dict[str, Any]], address: str, key: str, authority: str, token: str) -> None:
    import tmc_client
    from tmc_client.center import DEFAULT_TIMEOUT, Center
    from tmc_client.connecting.connection import Identity
    from tmc_pipeline.archive.restore import replay

    if authority and not Path(authority).is_file():
        raise CannotRun(f"There is no file {authority}: check --authority (or TMC_CA).")
    tls = tmc_client.Tls(authority=authority) if authority else None
    for message in messages:
        try:
            producer = Identity(app=message["producer"], key=key, tag=message["tag"], operator_token=token)
            with Center(address, producer, tls, DEFAULT_TIMEOUT, insecure=False) as center:
                typer.echo(f"{message['id']} was sent again as {replay(message, center)}", err=True)
        except tmc_client.TmcError as exc:
            raise CannotRun(f"{message['id']} was not sent again: {exc}") from exc


def main() -> None:
    """Entry point of `python -m tmc_pipeline` and of spark-submit."""
    app(prog_name="tmc pipeline")
