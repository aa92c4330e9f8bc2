"""One purchase in a transaction block, by a process that kills itself at one point of it.

usage: dying_producer.py ADDRESS KEY DATABASE NUMBER POINT; points: before-prepare, after-prepare, after-commit, after-submit
"""

from __future__ import annotations

import os
import signal
import sys
import time

import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc
from tmc_client.producing.transaction import Preparation, Transaction


def main(address: str, key: str, database: str, number: str, point: str) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    collect, write = Preparation.collect, Transaction._write

    def dying_collect(self):
        found = collect(self)
        if point == "after-prepare":
            die()
        return found

    def dying_write(self):
        if point == "before-prepare":
            die()
        write(self)

    def dying_submit(self):
        if point == "after-commit":
            die()
        for message in self.messages:
            self._producer.submit(message, tmc.center.DEFAULT_TIMEOUT)
        time.sleep(0.005)  # it is on its way, its answer is not here
        die()

    Preparation.collect, Transaction._submit, Transaction._write = dying_collect, dying_submit, dying_write
    center = tmc.connect(address, app="orders", key=key)
    engine = sa.create_engine(database)
    with Session(engine) as session, center.transaction(session) as tx:
        session.execute(sa.text("INSERT INTO purchase VALUES (:id)"), {"id": int(number)})
        tx.send("shop.paid", {"purchase": int(number)}, key=f"purchase-{number}")


if __name__ == "__main__":
    main(*sys.argv[1:])
