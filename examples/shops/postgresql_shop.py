"""SQLAlchemy on PostgreSQL: orders and coupons, each in a database of its own, an outbox for when the center is away."""

import os
import sys

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import tmc_client as tmc

ADDRESS = os.environ.get("TMC_ADDRESS", "127.0.0.1:50051")
orders = sa.create_engine(os.environ.get("SHOP_ORDERS", "postgresql+psycopg://shop@127.0.0.1/orders"))
coupons = sa.create_engine(os.environ.get("SHOP_COUPONS", "postgresql+psycopg://shop@127.0.0.1/coupons"))


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "paid"
    number: Mapped[int] = mapped_column(primary_key=True)


class Coupon(Base):
    __tablename__ = "coupon"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]


def prepare_databases() -> None:
    for engine in (orders, coupons):
        Base.metadata.create_all(engine)
        tmc.create_tables(engine)


def pay(center: tmc.Center, number: int) -> None:
    center.resume(orders)  # what a crash left behind
    with tmc.Outbox(orders, center) as outbox, Session(orders) as session:
        with center.transaction(session, fallback=outbox) as tx:
            session.add(Order(number=number))
            tx.send("order.paid", {"order": number}, key=f"paid-{number}")
        outbox.flush()


def consume(center: tmc.Center) -> None:
    consumer = tmc.Consumer(center)

    @consumer.listener("order.paid", inbox=tmc.SqlInbox(sessionmaker(coupons)))
    def give_coupon(paid: dict[str, int], session: Session) -> None:
        session.add(Coupon(number=paid["order"]))

    consumer.run()


def main(what: str, number: str = "7") -> None:
    prepare_databases()
    app = "orders" if what == "pay" else "coupons"
    with tmc.connect(ADDRESS, app=app) as center:
        if what == "consume":
            consume(center)
        else:
            pay(center, int(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
