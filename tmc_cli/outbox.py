"""`tmc outbox`: needs the client alone."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

from tmc_cli import fail, say
from tmc_cli.consuming import configure_logging
from tmc_client import errors
from tmc_client.consuming import loading
from tmc_client.outbox import Outbox
from tmc_client.outbox.store import Kept
from tmc_common.printable import escaped

_UNITS = {"m": 60, "h": 3_600, "d": 86_400}
_MOST = 1_000


def run(args: Sequence[str], prog_name: str) -> None:
    """One command."""
    options = _parser(prog_name).parse_args(args)
    configure_logging()
    try:
        box = loading.load(options.outbox, Outbox, "shop.messages:outbox")
        options.command(box, options)
    except errors.Unavailable as exc:
        fail(exc, code=1)
    except (ValueError, errors.TmcError) as exc:
        fail(exc)


def _parser(prog_name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog_name, description="Send what is in an outbox; see and repair the rest.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[Outbox, argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("outbox", metavar="MODULE:NAME", help="a tmc_client.Outbox")
        made.set_defaults(command=command)
        return made

    add("run", _run, "Run a relay until SIGTERM or SIGINT. Of all relays of a database, one works.")
    add("status", _status, "Counts by state, as JSON.")
    show = add("show", _show, "The messages with one key: whether and when they were sent, and the last error.")
    show.add_argument("key")
    add("failed", _failed, "The messages that were given up.")
    for name, command, text in (
        ("retry", _retry, "Try messages again that were given up."),
        ("discard", _discard, "Delete messages that were given up; what waits behind them is sent."),
    ):
        made = add(name, command, text)
        made.add_argument("ids", metavar="ID", type=int, nargs="*")
        made.add_argument("--all", action="store_true", help="of all that were given up")
    clean = add("clean", _clean, "Delete messages that were sent long ago.")
    clean.add_argument("--older-than", type=_age, default=timedelta(days=7), help="such as 12h or 30d; by default 7d")
    return parser


def _age(text: str) -> timedelta:
    match = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 12h or 30d")
    return timedelta(seconds=int(match[1]) * _UNITS[match[2]])


def _run(box: Outbox, _options: argparse.Namespace) -> None:
    relay = box.relay()
    say(f"relay {relay.name} sends what is in the outbox, or waits while another relay does; SIGTERM ends it.")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: relay.stop())
    relay.run()
    box.close()


def _status(box: Outbox, _options: argparse.Namespace) -> None:
    standing = box.store.standing()
    shares = {"direct_share": round(standing.direct_share, 4), "failed_share": round(standing.failed_share, 4)}
    oldest = _time(standing.oldest_unsent_ms) if standing.oldest_unsent_ms else None
    sys.stdout.write(json.dumps(asdict(standing) | shares | {"oldest_unsent": oldest}) + "\n")


def _show(box: Outbox, options: argparse.Namespace) -> None:
    found = box.store.by_key(options.key)
    if not found:
        fail(f"There is no message with key {options.key!r} in this outbox.", code=1)
    _print(found)


def _failed(box: Outbox, _options: argparse.Namespace) -> None:
    found = box.store.given_up(_MOST)
    if not found:
        say("None.")
    _print(found)
    if len(found) == _MOST:
        say(f"There may be more than these {_MOST}.")


def _print(found: Sequence[Kept]) -> None:
    for each in found:
        how = "directly" if each.direct else "by a relay"
        sent = f", sent {how} at {_time(each.sent_ms)}" if each.sent_ms else ""
        tries = f", refused {each.tries} times" if each.tries else ""
        error = f": {each.error}" if each.error else ""
        order = f" order key {each.order_key}," if each.order_key else ""
        line = (
            f"{each.id}  {each.state.name}  {each.topic} {each.key}:{order} added {_time(each.created_ms)}{sent}{tries}"
        )
        sys.stdout.write(escaped(line + error) + "\n")


def _retry(box: Outbox, options: argparse.Namespace) -> None:
    _change(box, options, box.store.retry, "are tried again")


def _discard(box: Outbox, options: argparse.Namespace) -> None:
    _change(box, options, box.store.discard, "are deleted")


def _change(box: Outbox, options: argparse.Namespace, change: Callable[[Sequence[int]], int], done: str) -> None:
    """Change the given FAILED messages, or all, and say how many. Ends with 1 if some of the ids name none."""
    if bool(options.ids) == options.all:
        raise ValueError("Give the ids that `tmc outbox failed` prints, or --all.")
    if options.ids:
        changed, given = change(options.ids), len(options.ids)
        say(f"{changed} of {given} {done}.")
        raise SystemExit(0 if changed == given else 1)
    count = 0
    while found := box.store.given_up(_MOST):
        count += change([kept.id for kept in found])
    say(f"{count} {done}.")


def _clean(box: Outbox, options: argparse.Namespace) -> None:
    say(f"{box.store.clean(options.older_than)} are deleted.")


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"
