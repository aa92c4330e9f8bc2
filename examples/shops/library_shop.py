"""The center inside the program: no other process, and one database file more."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import tmc_client as tmc

engine = sa.create_engine(os.environ.get("SHOP_URL", "sqlite:///shop.db"))


class Base(DeclarativeBase):
    pass


class Paid(Base):
    __tablename__ = "paid"
    number: Mapped[int] = mapped_column(primary_key=True)


class Coupon(Base):
    __tablename__ = "coupon"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]


@contextmanager
def running() -> Iterator[tmc.Center]:
    """The center with its consumer, as long as the program runs."""
    Base.metadata.create_all(engine)
    tmc.create_tables(engine)
    with tmc.connect(f"embedded+{engine.url}.center", app="shop") as center:
        center.checks(engine)
        center.resume(engine)
        consumer = tmc.Consumer(center)

        @consumer.listener("order.paid", inbox=tmc.SqlInbox(lambda: Session(engine)))
        def give_coupon(paid: dict[str, int], session: Session) -> None:
            session.add(Coupon(number=paid["order"]))

        with consumer:
            yield center


def pay(center: tmc.Center, number: int) -> None:
    with Session(engine) as session, center.transaction(session) as tx:
        session.add(Paid(number=number))
        tx.send("order.paid", {"order": number}, key=f"paid-{number}")


if __name__ == "__main__":
    with running() as shop:
        for line in sys.stdin:
            pay(shop, int(line))
