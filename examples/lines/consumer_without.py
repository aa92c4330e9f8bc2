"""Gives a coupon each time it is called, so twice for a message that arrives twice."""

import sqlalchemy as sa
from sqlalchemy.orm import Session

engine = sa.create_engine("sqlite:///coupons.db")


def give_coupon(number: int) -> None:
    with Session(engine) as session:
        session.execute(sa.text("INSERT INTO coupon VALUES (:number)"), {"number": number})
        session.commit()
