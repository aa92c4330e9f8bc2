"""Pays orders and sends no message."""

import sqlalchemy as sa
from sqlalchemy.orm import Session

engine = sa.create_engine("sqlite:///shop.db")


def pay(number: int) -> None:
    with Session(engine) as session:
        session.execute(sa.text("INSERT INTO paid VALUES (:number)"), {"number": number})
        session.commit()
