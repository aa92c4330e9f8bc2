"""Plans of `tmc size`: enough machines, none too many, and a sentence for what cannot be planned."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tmc_cli.size import BUSY, SHARD_PER_S, Costs, Load, Plan, costs_of, plan, run

ROOT = Path(__file__).parents[3]
COSTS = Costs(
    cpu_us={"server": (100, 50, 3, 2, 10), "database": (100, 50, 5, 0, 20), "broker": (0, 40, 0, 3, 0)},
    kept_bytes=(700, 200, 1100, 0, 0),
    logged_bytes=(2500, 900, 2500, 0, 0),
)


def _load(rate: float, subscribers: int = 1, body: int = 1024, shards: int = 1) -> Load:
    return Load(messages_per_s=rate, subscribers=subscribers, body_bytes=body, shards=shards)


def test_a_message_costs_what_its_lines_say() -> None:
    assert COSTS.cores("server", _load(1e6, subscribers=3, body=2048)) == 100 + 3 * 50 + 2 * 3 + 2 * 3 * 2
    assert COSTS.cores("server", _load(1e6, shards=3)) - COSTS.cores("server", _load(1e6)) == 2 * 10
    assert COSTS.bytes_per_day(COSTS.kept_bytes, _load(2)) == 2 * 86_400 * (700 + 200 + 1100)


def _plan(load: Load, cores: int = 4, copies: int = 3, average: float = 1) -> Plan:
    return plan(load, COSTS, machine_cores=cores, queue_copies=copies, average_per_s=average)


def test_each_database_has_a_shard() -> None:
    dear = Costs(cpu_us=COSTS.cpu_us | {"database": (900, 0, 0, 0, 0)}, kept_bytes=(1,) * 5, logged_bytes=(1,) * 5)
    made = plan(_load(5000), dear, machine_cores=1, queue_copies=1, average_per_s=1)
    assert made.load.shards == made.databases > 2
    assert _plan(_load(10_000, subscribers=3, shards=32)).load.shards == 32
    assert _plan(_load(10)).load.shards == 1


def test_a_shard_takes_no_more_than_one_has_taken() -> None:
    cheap = Costs(cpu_us=dict.fromkeys(COSTS.cpu_us, (1, 0, 0, 0, 0)), kept_bytes=(1,) * 5, logged_bytes=(1,) * 5)
    made = plan(_load(int(10 * SHARD_PER_S * BUSY)), cheap, machine_cores=4, queue_copies=1, average_per_s=1)
    assert (made.load.shards, made.processes, made.databases) == (10, 2, 1)


@pytest.mark.parametrize("rate", [1, 500, 4000, 20_000, 1_000_000])
@pytest.mark.parametrize("cores", [2, 16])
@pytest.mark.parametrize("copies", [1, 3])
def test_no_part_is_busier_than_planned_and_none_has_a_machine_too_many(rate: int, cores: int, copies: int) -> None:
    made = _plan(_load(rate, subscribers=3), cores, copies)
    busy = made.busy_cores
    assert max(busy["server"] / BUSY, busy["server"] / 0.9 + 1, 2) <= made.processes + 1e-9
    assert made.processes < max(busy["server"] / BUSY, busy["server"] / 0.9 + 1, 1) + 1 + 1e-9
    assert made.processes - 1 > busy["server"], "the others do the work of one that stops"
    for part, machines, least in (("database", made.databases, 1), ("broker", made.brokers, copies)):
        assert busy[part] <= machines * cores * BUSY + 1e-9
        assert machines == least or busy[part] > (machines - 1) * cores * BUSY
    has = {"server": made.processes, "database": made.databases * cores, "broker": made.brokers * cores}
    for part, cores in has.items():
        assert math.isclose(made.saturated_per_s[part], rate * cores / busy[part])
    assert min(made.saturated_per_s.values()) >= rate
    assert busy["broker"] == copies * COSTS.cores("broker", made.load)


def test_disks_are_for_the_average() -> None:
    peak, average = _plan(_load(1000), average=1000), _plan(_load(1000), average=100)
    assert (peak.processes, peak.databases) == (average.processes, average.databases)
    assert peak.kept_bytes_per_day == 10 * average.kept_bytes_per_day
    assert peak.logged_bytes_per_day == 10 * average.logged_bytes_per_day


def test_a_load_beyond_one_center_is_shared(capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan(_load(32 * SHARD_PER_S // 4), cores=64).centers == 1
    assert _plan(_load(32 * SHARD_PER_S + 1), cores=64).centers > 1
    run(["--messages-per-second", "100000000", "--cores", "8"], "tmc size")
    assert "A center has 32 shards: share the topics among " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["mariadb", "postgresql"])
def test_measured_costs_come_with_the_command(kind: str) -> None:
    about = json.loads((ROOT / "tmc_cli" / "costs.json").read_text())
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", about["version"])
    assert about["costs"]["mariadb"] != about["costs"]["postgresql"]
    costs = costs_of(kind)
    for line in (*costs.cpu_us.values(), costs.kept_bytes, costs.logged_bytes):
        assert len(line) == len(_load(1).terms)
        assert min(line) >= 0
        assert sum(line) > 0


_GOOD = {"cpu_us": {part: [1, 0, 0, 0, 0] for part in COSTS.cpu_us}}
_GOOD |= {"kept_bytes": [1, 0, 0, 0, 0], "logged_bytes": [1, 0, 0, 0, 0]}
_BAD = [
    {},
    _GOOD | {"cpu_us": {}},
    _GOOD | {"kept_bytes": [1, 0, 0, 0]},
    _GOOD | {"kept_bytes": [0, 0, 0, 0, 0]},
    _GOOD | {"kept_bytes": [5, 0, 0, 0, -1]},
    _GOOD | {"kept_bytes": [math.inf, 0, 0, 0, 0]},
    _GOOD | {"kept_bytes": [math.nan, 0, 0, 0, 0]},
    _GOOD | {"logged_bytes": "12345x"},
]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"costs": 1}', *(json.dumps({"costs": {"mariadb": bad}}) for bad in _BAD)]
)
def test_a_file_without_costs_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        run(["--messages-per-second", "10", "--database", "mariadb", "--costs", str(path)], "tmc size")
    assert ended.value.code == 2
    said = f"--costs {path}: no costs of mariadb are in there. ./scripts/bench capacity --output mine.json writes such a file.\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("name", "said"), [("missing", "No such file or directory"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_named(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--messages-per-second", "10", "--costs", str(tmp_path / name)], "tmc size")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"--costs {tmp_path / name}: {said}.\n"


def test_bytes_are_no_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes").write_bytes(b"\x80\x98")
    with pytest.raises(SystemExit):
        run(["--messages-per-second", "10", "--costs", str(tmp_path / "bytes")], "tmc size")
    assert f"--costs {tmp_path}/bytes: no costs of postgresql are in there." in capsys.readouterr().err


def test_the_same_plan_for_people_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--messages-per-second", "20000", "--subscribers", "3", "--database", "mariadb"]
    run([*asked, "--json"], "tmc size")
    made = json.loads(capsys.readouterr().out)
    run(asked, "tmc size")
    text = capsys.readouterr().out
    assert (made["subscribers"], made["database"], made["is_extrapolated"]) == (3, "mariadb", False)
    assert made["kept_bytes"] == pytest.approx(7 * made["kept_bytes_per_day"], rel=1e-6)
    assert f"servers       {made['servers']} processes" in text
    assert f"mariadb       {made['databases']} with 4 cores each" in text
    rate = made["saturated_per_s"][made["saturates_first"]]
    assert f"The {made['saturates_first']}s saturate first, at {rate:,} messages per second." in text


def test_what_the_figures_do_not_cover_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--messages-per-second", "20", "--subscribers", "11"], "tmc size")
    text = capsys.readouterr().out
    assert "less than 0.1 cores busy" in text
    assert "At this rate a message costs several times as much as planned" in text
    assert "More than 10 subscribers and bodies above 16 KiB were not measured" in text
    run(["--messages-per-second", "100", "--body", "20000", "--json"], "tmc size")
    assert json.loads(capsys.readouterr().out)["is_extrapolated"]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--messages-per-second", "0"],
        ["--messages-per-second", "1e3"],
        ["--messages-per-second", "10", "--subscribers", "0"],
        ["--messages-per-second", "10", "--body", "262145"],
        ["--messages-per-second", "10", "--database", "oracle"],
        ["--messages-per-second", "10", "--average", "11"],
        [],
    ],
)
def test_what_cannot_be_planned_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(wrong, "tmc size")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: tmc size")
