"""A producer that buys, one transaction block after the other, until FOLDER/enough exists; started again after each kill.

usage: buyer.py ADDRESS KEY DATABASE FOLDER. Every fifth purchase is prepared and committed, and never submitted: it is left to
a check. Every seventh is rolled back.
"""

from __future__ import annotations

import sys
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc
from tests.integration.server.test_checks import prepared_with
from tests.support.story.kill_points import PRODUCER, arm
from tmc_client.producing.ledger import ledger, rows_for


class NoMoney(Exception):
    """The purchase is rolled back."""


def buy(center: tmc.Center, engine: sa.Engine, number: int) -> None:
    with Session(engine) as session, center.transaction(session) as tx:
        session.execute(sa.text("INSERT INTO purchase VALUES (:id)"), {"id": number})
        tx.send("shop.paid", {"order": f"purchase-{number}"}, key=f"purchase-{number}")
        if number % 7 == 0:
            raise NoMoney


def leave(center: tmc.Center, engine: sa.Engine, number: int) -> None:
    """As a producer that died after its commit."""
    key = f"purchase-{number}"
    message = prepared_with(center, engine, "shop.paid", key, committed=False)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"INSERT INTO purchase VALUES ({number})")
        connection.execute(ledger.insert(), rows_for([message]))


def main(address: str, key: str, database: str, folder: str) -> None:
    center, engine = tmc.connect(address, app="orders", key=key), sa.create_engine(database)
    with engine.connect() as connection:
        number = connection.exec_driver_sql("SELECT COALESCE(MAX(id), 0) FROM purchase").scalar_one()
    number += 1_000  # no key of the run before is used again: its purchase may be undecided
    while not (Path(folder) / "enough").exists():
        number += 1
        try:
            (leave if number % 5 == 0 else buy)(center, engine, number)
        except (NoMoney, tmc.TmcError):
            continue  # the truth is in the table
    center.close()


if __name__ == "__main__":
    arm(PRODUCER)
    main(*sys.argv[1:])
