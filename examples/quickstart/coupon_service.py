"""Gives exactly one coupon for every paid order, however often the message is delivered.

usage: coupon_service.py CENTER_ADDRESS DATABASE_URL; COUPONS_KEY: of the app, where the center asks for one
"""

from __future__ import annotations

import os
import sys

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import tmc_client as tmc


class Base(DeclarativeBase):
    pass


class Coupon(Base):
    """No constraint prevents a second coupon for an order: the inbox does."""

    __tablename__ = "coupons"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]


def main(address: str, database: str) -> None:
    engine = sa.create_engine(database)
    Base.metadata.create_all(engine)
    tmc.create_tables(engine)
    center = tmc.connect(address, app="coupons", key=os.environ.get("COUPONS_KEY", ""))
    consumer = tmc.Consumer(center, concurrency=4)

    @consumer.listener("order.paid", inbox=tmc.SqlInbox(sessionmaker(engine)))
    def give_coupon(paid: dict, session: Session) -> None:
        session.add(Coupon(order_id=paid["order"]))

    consumer.run()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
