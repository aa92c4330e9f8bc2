"""A shop that uses the outbox alone. `outbox`: for `tmc outbox run`. As a program: a producer, until it is killed.

OUTBOX_DATABASE, OUTBOX_BROKER: addresses.
"""

from __future__ import annotations

import os
import sys

import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc
from tmc_client.outbox import timedelta

TOPIC = "shop.paid"
_shop = sa.MetaData()
purchase = sa.Table(
    "purchase",
    _shop,
    sa.Column("line", sa.String(32), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
)


def make_tables(engine: sa.Engine) -> None:
    tmc.create_tables(engine)
    _shop.create_all(engine)


if "OUTBOX_DATABASE" in os.environ:
    engine = sa.create_engine(os.environ["OUTBOX_DATABASE"])
    outbox = tmc.Outbox(
        engine,
        tmc.RabbitTarget(os.environ["OUTBOX_BROKER"], routing_key=lambda _entry: TOPIC),
        untouched=timedelta(milliseconds=500),
        lease=timedelta(seconds=1),
    )


def produce(name: str, lines: int) -> None:
    """Purchases without end: in every other line with an order key."""
    while True:
        for each in range(lines):
            line = f"{name}-{each}"
            with Session(engine) as session:
                newest = sa.select(sa.func.max(purchase.c.number)).where(purchase.c.line == line)
                number = (session.execute(newest).scalar() or 0) + 1
                session.execute(purchase.insert().values(line=line, number=number))
                outbox.add(session, TOPIC, {}, key=f"{line}:{number}", order_key=line if each % 2 else "")
                session.commit()
                session.execute(purchase.insert().values(line=f"{line}-never", number=number))
                outbox.add(session, TOPIC, {}, key=f"{line}-never:{number}")
                session.flush()
                session.rollback()


if __name__ == "__main__":
    produce(sys.argv[1], int(sys.argv[2]))
