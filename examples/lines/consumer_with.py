"""Gives one coupon for each order that was paid."""

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc

engine = sa.create_engine("sqlite:///coupons.db")
tmc.create_tables(engine)
consumer = tmc.Consumer(tmc.connect("127.0.0.1:50051", app="coupons"))


@consumer.listener("order.paid", inbox=tmc.SqlInbox(sessionmaker(engine)))
def give_coupon(paid: dict[str, int], session: Session) -> None:
    session.execute(sa.text("INSERT INTO coupon VALUES (:number)"), {"number": paid["order"]})


if __name__ == "__main__":
    consumer.run()
