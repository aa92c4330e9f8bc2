"""Takes orders and announces them: the order, the ledger row and the message succeed or fail together.

usage: order_service.py CENTER_ADDRESS DATABASE_URL ORDERS; ORDERS_KEY: of the app, where the center asks for one
"""

from __future__ import annotations

import os
import sys

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import tmc_client as tmc

ORDER_PAID: tmc.Topic[dict] = tmc.topic("order.paid", dict)


class Base(DeclarativeBase):
    pass


class Order(Base):
    """status: new, paid, cancelled, interrupted (the service died while it worked on it)."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str]


class Cancelled(Exception):
    """The customer changed their mind in the middle of the transaction."""


def pay(center: tmc.Center, session: Session, number: int) -> None:
    order = session.get_one(Order, number)
    with center.transaction(session) as tx:
        order.status = "paid"
        tx.send(ORDER_PAID, {"order": order.id}, key=f"paid-{order.id}")
        if number % 9 == 0:
            raise Cancelled


def main(address: str, database: str, orders: int) -> None:
    engine = sa.create_engine(database)
    Base.metadata.create_all(engine)
    tmc.create_tables(engine)
    center = tmc.connect(address, app="orders", key=os.environ.get("ORDERS_KEY", ""))
    center.resume(engine)  # what an earlier run committed and could not submit
    with Session(engine) as session:
        session.execute(sa.update(Order).where(Order.status == "new").values(status="interrupted"))
        session.commit()
        first = (session.scalar(sa.select(sa.func.max(Order.id))) or 0) + 1
        for number in range(first, orders + 1):
            session.add(Order(id=number, status="new"))
            session.commit()
            while True:
                try:
                    pay(center, session, number)
                    break
                except Cancelled:
                    session.get_one(Order, number).status = "cancelled"
                    session.commit()
                    break
                except (tmc.Unavailable, tmc.KeyInProgress):
                    continue  # the center is unreachable, or does not know yet that our last attempt was rolled back
    center.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
