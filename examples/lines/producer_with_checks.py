"""As producer_with, and what a crash leaves undecided is answered."""

import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc

engine = sa.create_engine("sqlite:///shop.db")
tmc.create_tables(engine)
center = tmc.connect("127.0.0.1:50051", app="orders")
center.checks(engine).serve("127.0.0.1:50061")


def pay(number: int) -> None:
    with Session(engine) as session, center.transaction(session) as tx:
        session.execute(sa.text("INSERT INTO paid VALUES (:number)"), {"number": number})
        tx.send("order.paid", {"order": number}, key=f"paid-{number}")
