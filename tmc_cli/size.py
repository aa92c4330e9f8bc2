"""`tmc size`: the servers, databases, brokers and disks that a load needs, by measured costs of a message.

What a message costs grows with its subscribers, with its body, with its body for each subscriber, and with the shards in use,
each by a straight line. `./scripts/bench capacity` measures these lines, and writes `costs.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from tmc_cli import fail
from tmc_common.fields import BODY_BYTES
from tmc_common.printable import escaped

BUSY = 0.6
"""The share of a core that is planned for: what is busier has no room for a failed neighbor, and calls wait for each other."""
_ALONE = 0.9
"""The share of a core that is planned for while one server is missing."""
SHARDS = 32
"""How many a center has."""
SHARD_PER_S = 4000
"""Messages per second that one shard had in `bench lifecycle`: its server shared two cores with everything else."""
_DAY_S = 86_400
_TERMS = 5  # of a load
_MEASURED_SUBSCRIBERS, _MEASURED_BYTES = 10, 16384
_FEW = 1000  # messages per second: fewer do not fill the commits of a server
_PARTS = ("server", "database", "broker")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Messages and where they go. messages_per_s: whole lives, to the stored ack.  shards: those that the topics are in."""

    messages_per_s: float
    subscribers: int
    body_bytes: int
    shards: int = 1

    @property
    def terms(self) -> tuple[float, ...]:
        """The factors of the coefficients.

        With more shards, fewer messages share a commit. Measured with 256 calls at a time for each server.
        """
        kib = self.body_bytes / 1024
        return (1.0, self.subscribers, kib, kib * self.subscribers, min(self.shards, SHARDS) - 1)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one message on one kind of database, as coefficients of `Load.terms`.

    cpu_us: microseconds of a core, by part.  kept_bytes: in the tables until retention removes it.  logged_bytes: written to the
    database's log.
    """

    cpu_us: Mapping[str, Sequence[float]]
    kept_bytes: Sequence[float]
    logged_bytes: Sequence[float]

    def cores(self, part: str, load: Load) -> float:
        """Return how many cores the load keeps busy."""
        return _sum(self.cpu_us[part], load) * load.messages_per_s / 1e6

    def bytes_per_day(self, coefficients: Sequence[float], load: Load) -> float:
        """Return the bytes of a day, by the coefficients of kept or of logged ones."""
        return _sum(coefficients, load) * load.messages_per_s * _DAY_S


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The machines for a load.

    processes: servers, of a core each.  databases, brokers: machines.  saturated_per_s: messages per second at which a part
    has no idle core left, and shards are full.  centers: how many share the load; more than one if 32 shards are too few.
    """

    load: Load
    centers: int
    busy_cores: Mapping[str, float]
    processes: int
    databases: int
    brokers: int
    saturated_per_s: Mapping[str, float]
    kept_bytes_per_day: float
    logged_bytes_per_day: float


def costs_of(kind: str, path: str | None = None) -> Costs:
    """Read what messages cost. path: of a file that `bench capacity` wrote; None: of the one that comes with this command.

    Raises ValueError: the file cannot be read, or lacks costs of this kind of database.
    """
    try:
        text = files("tmc_cli").joinpath("costs.json").read_text() if path is None else Path(path).read_text()
        found = json.loads(text)["costs"][kind]
        costs = Costs(
            cpu_us={part: _line(found["cpu_us"][part]) for part in _PARTS},
            kept_bytes=_line(found["kept_bytes"]),
            logged_bytes=_line(found["logged_bytes"]),
        )
    except OSError as exc:
        raise ValueError(f"--costs {path}: {exc.strerror}.") from exc
    except (KeyError, TypeError, ValueError) as exc:
        raise ValueError(
            f"--costs {path}: no costs of {kind} are in there. ./scripts/bench capacity --output mine.json writes such a file."
        ) from exc
    return costs


def plan(load: Load, costs: Costs, *, machine_cores: int, queue_copies: int, average_per_s: float) -> Plan:
    """Find the machines that a load needs. machine_cores: of each machine of a database or a broker.

    queue_copies: nodes that keep each queue.  average_per_s: messages per second over the day, for disks.
    """
    of_each, rate, shards = machine_cores * BUSY, load.messages_per_s, 0
    needed = max(load.shards, math.ceil(rate / (SHARD_PER_S * BUSY)))
    while needed > shards:  # each database has a shard at least, and messages in more shards cost more
        shards = needed
        load = replace(load, shards=min(shards, SHARDS))
        busy = {part: costs.cores(part, load) * (queue_copies if part == "broker" else 1) for part in _PARTS}
        needed = databases = math.ceil(busy["database"] / of_each)
    processes = max(2, math.ceil(busy["server"] / BUSY), math.ceil(busy["server"] / _ALONE) + 1)
    brokers = max(queue_copies, math.ceil(busy["broker"] / of_each))
    has = {"server": processes, "database": databases * machine_cores, "broker": brokers * machine_cores}
    average = replace(load, messages_per_s=average_per_s)
    return Plan(
        load=load,
        centers=math.ceil(shards / SHARDS),
        busy_cores=busy,
        processes=processes,
        databases=databases,
        brokers=brokers,
        saturated_per_s={part: has[part] / busy[part] * rate for part in _PARTS} | {"shard": shards * SHARD_PER_S},
        kept_bytes_per_day=costs.bytes_per_day(costs.kept_bytes, average),
        logged_bytes_per_day=costs.bytes_per_day(costs.logged_bytes, average),
    )


def run(args: Sequence[str], prog_name: str) -> None:
    """Print a plan."""
    parser = _parser(prog_name)
    options = parser.parse_args(args)
    busiest = options.messages_per_second
    average = options.average or busiest
    if average > busiest:
        parser.error(f"--average {average} is more than --messages-per-second {busiest}, which is for the busiest time")
    load = Load(messages_per_s=busiest, subscribers=options.subscribers, body_bytes=options.body, shards=options.shards)
    try:
        costs = costs_of(options.database, options.costs)
    except ValueError as exc:
        fail(exc)
    made = plan(load, costs, machine_cores=options.cores, queue_copies=options.queue_copies, average_per_s=average)
    sys.stdout.write(json.dumps(_as_json(made, options)) + "\n" if options.json else _as_text(made, options))


def _line(found: Any) -> tuple[float, ...]:
    """Read the coefficients of a line. Raises TypeError, ValueError: they are not."""
    line = tuple(map(float, found))
    if len(line) != _TERMS or min(line) < 0 or not 0 < sum(line) < math.inf:
        raise ValueError(f"{found} are no costs")
    return line


def _sum(coefficients: Sequence[float], load: Load) -> float:
    return sum(coefficient * term for coefficient, term in zip(coefficients, load.terms, strict=True))


def _as_json(made: Plan, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "database": options.database,
        "messages_per_second": made.load.messages_per_s,
        "subscribers": made.load.subscribers,
        "body_bytes": made.load.body_bytes,
        "is_extrapolated": _is_extrapolated(made),
        "centers": made.centers,
        "servers": made.processes,
        "databases": made.databases,
        "brokers": made.brokers,
        "shards": made.load.shards,
        "busy_cores": {part: float(f"{cores:.3g}") for part, cores in made.busy_cores.items()},
        "saturated_per_s": {part: round(rate) for part, rate in made.saturated_per_s.items()},
        "saturates_first": _first(made),
        "kept_bytes_per_day": round(made.kept_bytes_per_day),
        "logged_bytes_per_day": round(made.logged_bytes_per_day),
        "kept_bytes": round(made.kept_bytes_per_day * options.days_kept),
    }


def _as_text(made: Plan, options: argparse.Namespace) -> str:
    kept, logged, days = made.kept_bytes_per_day, made.logged_bytes_per_day, options.days_kept
    busy = {part: f"{_cores(cores)} busy" for part, cores in made.busy_cores.items()}
    machines = f"with {options.cores} cores each"
    copies = f"; each queue is on {options.queue_copies} nodes" if options.queue_copies > 1 else ""
    spread = "for the busy topics: register as many of them, or give them a --spread" if made.load.shards > 1 else ""
    rows = [
        ("servers", f"{made.processes} processes", f"{busy['server']}; enough if one of them stops"),
        (options.database, f"{made.databases} {machines}", f"{busy['database']}; replicas come on top"),
        ("rabbitmq", f"{made.brokers} {machines}", busy["broker"] + copies),
        ("shards", f"{made.load.shards}{' in each center' if made.centers > 1 else ''}", spread),
        ("rows", _size(kept), f"a day; {_size(kept * days)} when closed messages are kept for {days} days"),
        ("database log", _size(logged), "written a day"),
    ]
    first = _first(made)
    said = [f"The {first}s saturate first, at {made.saturated_per_s[first]:,.0f} messages per second."]
    if made.centers > 1:
        said.append(f"A center has {SHARDS} shards: share the topics among {made.centers} centers.")
    if made.load.messages_per_s < _FEW:
        said.append(
            "At this rate a message costs several times as much as planned; the smallest plan has that to spare."
        )
    if _is_extrapolated(made):
        said.append(
            "More than 10 subscribers and bodies above 16 KiB were not measured: these figures extend the lines."
        )
    said.append(f"Cores and shards are planned to be {BUSY:.0%} busy. How good these figures are: docs/capacity.md.")
    table = "".join(f"{name:13} {value:27} {note}".rstrip() + "\n" for name, value, note in rows)
    return table + "".join(f"{sentence}\n" for sentence in said)


def _is_extrapolated(made: Plan) -> bool:
    return made.load.subscribers > _MEASURED_SUBSCRIBERS or made.load.body_bytes > _MEASURED_BYTES


def _cores(count: float) -> str:
    return f"{count:,.1f} cores" if count >= 0.1 else "less than 0.1 cores"


def _first(made: Plan) -> str:
    return min(made.saturated_per_s, key=made.saturated_per_s.__getitem__)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} PB"


def _parser(prog_name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog_name,
        description="Say which servers, databases, brokers and disks a load needs, by measured costs of a message.",
        allow_abbrev=False,
    )
    rate = _number(1, 10**9)
    parser.add_argument("--messages-per-second", type=rate, required=True, metavar="N", help="at the busiest time")
    parser.add_argument(
        "--average", type=rate, metavar="N", help="messages per second over the day, for disks (the same)"
    )
    parser.add_argument("--subscribers", type=_number(1, 10_000), default=1, metavar="N", help="of each message (1)")
    parser.add_argument(
        "--body", type=_number(0, BODY_BYTES), default=1024, metavar="BYTES", help="of each message (1024)"
    )
    parser.add_argument(
        "--shards", type=_number(1, SHARDS), default=1, metavar="N", help="that the busy topics are in (1)"
    )
    parser.add_argument(
        "--database", choices=("mariadb", "postgresql"), default="postgresql", help="kind of the store (postgresql)"
    )
    parser.add_argument(
        "--cores", type=_number(1, 1024), default=4, metavar="N", help="of a machine for a database or a broker (4)"
    )
    parser.add_argument(
        "--queue-copies", type=_number(1, 99), default=3, metavar="N", help="nodes that keep each queue (3)"
    )
    parser.add_argument(
        "--days-kept",
        type=_number(1, 10_000),
        default=7,
        metavar="N",
        help="until retention removes a closed message (7)",
    )
    parser.add_argument("--costs", metavar="FILE", help="measured on your machine: bench capacity --output FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _number(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of whole numbers in this range."""

    def parse(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() else -1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{escaped(text)} is not a whole number from {low} to {high}.")
        return number

    return parse
