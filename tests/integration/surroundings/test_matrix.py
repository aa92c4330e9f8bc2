"""A guest in surroundings of other people: kinds of processes, paths to databases, and what a program does with the SDK.

Each cell works, or is refused at once in one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.integration.surroundings.guest import PATHS, USES, Place, make_tables, use_all
from tests.integration.surroundings.processes import PROCESSES
from tests.support.center import RunningCenter
from tests.support.dose import LONG
from tests.support.pgbouncer import PgBouncer
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

ROOT = Path(__file__).parents[3]
TWO = "refused: This session writes to two databases"
REFUSED: Mapping[tuple[str, str], str] = {
    ("two engines", use): TWO
    for use in (
        "block",
        "block_that_prepares_first",
        "block_whose_commit_is_refused",
        "block_with_a_fallback",
        "inbox",
        "block_in_a_handler",
        "outbox_block",
        "outbox_and_its_relay",
    )
}
ON = {
    "sqlite": ("direct", "pool of one", "replica", "two engines"),
    "mariadb": ("direct", "pool of one", "replica", "two engines", "latin1"),
    "postgresql": tuple(path for path in PATHS if path != "latin1"),
}
CELLS = [(database, path) for database, paths in ON.items() for path in paths]
SAMPLE = [("sqlite", "direct"), ("mariadb", "pool of one"), ("postgresql", "PgBouncer by transaction")]
TAKEN = {  # connections that the program's thread takes from its pool: one per transaction
    "block": 1,
    "block_that_prepares_first": 1,
    "block_that_fails": 0,
    "block_whose_commit_is_refused": 2,
    "block_with_a_fallback": 2,
    "checks": 2,
    "inbox": 4,
    "block_in_a_handler": 1,
    "outbox_block": 2,
    "outbox_and_its_relay": 1,
    "block_on_a_connection_of_the_driver": 0,
    "asyncio_block_and_handler": 0,
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("guests")
    with RunningCenter(f"sqlite:///{folder}/c.db", open_to_all=True) as made:
        yield made


@pytest.fixture(scope="module")
def place_of(
    running: RunningCenter,
    mariadb: MariaDB,
    postgresql: PostgreSQL,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str, str], Place]]:
    """By path and database; tables are made."""
    bouncers = {
        "PgBouncer by session": PgBouncer(postgresql.port, "session", size=8),
        "PgBouncer by transaction": PgBouncer(postgresql.port, "transaction", size=2),
    }

    def make(path: str, database: str) -> Place:
        name = f"guest_{list(PATHS).index(path)}"
        if database == "sqlite":
            folder = tmp_path_factory.mktemp("shop")
            urls = [f"sqlite:///{folder}/{each}.db" for each in (name, "second")]
            place = Place(
                path=path,
                url=urls[0],
                second=urls[1],
                asynchronous=urls[0].replace("sqlite", "sqlite+aiosqlite"),
                center=running.address,
            )
        else:
            server: MariaDB | PostgreSQL = mariadb if database == "mariadb" else postgresql
            driver = "asyncmy" if database == "mariadb" else "psycopg"
            url, second = server.create(name), server.create(f"{name}_second")
            if path == "latin1":
                _make_latin1(url)
            place = Place(
                path=path,
                url=url,
                second=second,
                asynchronous=sa.make_url(url)
                .set(drivername=f"{sa.make_url(url).get_backend_name()}+{driver}")
                .render_as_string(hide_password=False),
                center=running.address,
            )
        make_tables(place)
        if path in bouncers:
            through = bouncers[path].url(name)
            place = Place(**asdict(place) | {"url": through, "asynchronous": through})
        return place

    yield make
    for bouncer in bouncers.values():
        bouncer.stop()


def _make_latin1(url: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE {engine.url.database} CHARACTER SET latin1")
    engine.dispose()


def _unexpected(path: str, said: Mapping[str, str]) -> dict[str, str]:
    """Uses that did not end as they should."""
    ends = {use: REFUSED.get((path, use), "works") for use in USES}
    return {use: said[use] for use, end in ends.items() if not said[use].startswith(end)}


@pytest.mark.parametrize(("database", "path"), CELLS)
def test_each_use_over_each_path(database: str, path: str, place_of: Callable[[str, str], Place]) -> None:
    found = use_all(place_of(path, database))
    assert _unexpected(path, {use: each.said for use, each in found.items()}) == {}
    if path == "pool of one":
        assert {use: found[use].taken for use in TAKEN} == TAKEN


@pytest.mark.parametrize("process", PROCESSES)
def test_each_path_in_each_kind_of_process(process: str, place_of: Callable[[str, str], Place], tmp_path: Path) -> None:
    places = [place_of(path, database) for database, path in (CELLS if LONG else SAMPLE)]
    (tmp_path / "places.json").write_text(json.dumps([asdict(place) for place in places]))
    said = PROCESSES[process](tmp_path / "places.json")
    unexpected = {place.name: _unexpected(place.path, said[place.name]) for place in places}
    assert unexpected == {place.name: {} for place in places}
