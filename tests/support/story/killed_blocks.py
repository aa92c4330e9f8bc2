"""Blocks in a process each, killed at every step, or with a commit that is refused, cut off, or answered too late.

python killed_blocks.py CENTER DATABASE COUNT SEED: prints a line of JSON: how many blocks of each step, and for how long those
whose commit was refused went on, in milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc
from tmc_client.producing import transaction

TOPIC = "killed.paid"
AT_ONCE = 4
LATEST_KILL_S = 0.04


class RefusedError(Exception):
    """A listener raises it, as if the database refused the commit."""


def _die(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _before(owner: Any, name: str) -> None:
    setattr(owner, name, _die)


def _after(owner: Any, name: str) -> None:
    real = getattr(owner, name)

    def wrapped(*arguments: Any) -> Any:
        real(*arguments)
        _die()

    setattr(owner, name, wrapped)


def _refuse(session: Session) -> None:
    def refuse(_session: Session) -> None:
        session.info["refused"] = time.monotonic()
        raise RefusedError

    sa.event.listen(session, "before_commit", refuse, once=True)


def _cut(session: Session, commit_first: bool = False) -> None:
    """The connection breaks around COMMIT."""

    def cut(connection: sa.Connection) -> None:
        raw: Any = connection.connection.dbapi_connection
        if commit_first:
            raw.commit()
        raw.close()

    sa.event.listen(session.get_bind(), "commit", cut, once=True)


def _refuse_and_die(center: tmc.Center, session: Session) -> None:
    _refuse(session)
    _before(center.producer, "rollback")


STEPS: Mapping[str, Callable[[tmc.Center, Session], object]] = {
    "nothing happens": lambda center, session: None,
    "before prepare": lambda center, session: _before(center.producer, "prepare"),
    "after prepare": lambda center, session: _after(transaction.Preparation, "collect"),
    "before the commit": lambda center, session: sa.event.listen(session, "before_commit", _die),
    "in the commit": lambda center, session: sa.event.listen(session.get_bind(), "commit", _die),
    "after the commit": lambda center, session: sa.event.listen(session, "after_commit", _die),
    "before submit": lambda center, session: _before(center.producer, "submit"),
    "after submit": lambda center, session: _after(center.producer, "submit"),
    "commit refused": lambda center, session: _refuse(session),
    "commit refused, then killed": _refuse_and_die,
    "cut off before the commit": lambda center, session: _cut(session),
    "cut off after the commit": lambda center, session: _cut(session, commit_first=True),
    "at any moment": lambda center, session: None,
}
KEY_IS_FREE = ("commit refused", "cut off before the commit")


def _pay(center: tmc.Center, session: Session, number: int) -> None:
    with center.transaction(session, prepare_timeout=timedelta(seconds=20)) as tx:
        session.execute(sa.text("INSERT INTO orders VALUES (:number)"), {"number": number})
        tx.send(TOPIC, {"order": number}, key=f"paid-{number}")


def _child(address: str, url: str, number: int, step: str, report: int) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    center = tmc.connect(address, app="orders")
    with Session(engine) as session:
        STEPS[step](center, session)
        try:
            _pay(center, session, number)
        except (RefusedError, sa.exc.DBAPIError):
            if "refused" in session.info:
                took = (time.monotonic() - session.info["refused"]) * 1_000
                os.write(report, f"{took:.1f}\n".encode())
            if step in KEY_IS_FREE:
                _pay(center, session, number)  # again, with the same key, at once


def main(address: str, url: str, count: int, seed: int) -> None:
    chance = random.Random(seed)
    at_once = 1 if url.startswith("sqlite") else AT_ONCE  # its writers get in each other's way
    reading, writing = os.pipe()
    done: Counter[str] = Counter()
    wrong: list[str] = []
    running: dict[int, tuple[int, str]] = {}
    for number in range(count):
        step = chance.choice(list(STEPS))
        done[step] += 1
        child = os.fork()
        if child == 0:
            try:
                _child(address, url, number, step, writing)
            except BaseException as exc:  # noqa: BLE001 - reported, and a child does not go on as its parent
                sys.stderr.write(f"{step}: {exc!r}\n")
                os._exit(1)
            os._exit(0)
        running[child] = (number, step)
        if step == "at any moment":
            time.sleep(chance.uniform(0, LATEST_KILL_S))
            os.kill(child, signal.SIGKILL)
        while len(running) >= at_once or (running and number == count - 1):
            ended, status = os.wait()
            which, at = running.pop(ended)
            if status not in (0, signal.SIGKILL):
                wrong.append(f"{which}, {at}: {status}")
    os.close(writing)
    with os.fdopen(reading) as lines:
        took = [float(line) for line in lines]
    print(json.dumps({"done": done, "wrong": wrong, "refused_ms": took}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
