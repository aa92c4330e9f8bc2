"""Flask and SQLAlchemy. Checks are answered beside the application.

The center finds them by check_address=, and over HTTP, after:
tmc admin set-check order.paid --kind http --option path=/tmc/checks --option batch=true
"""

import os

import flask
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc

ADDRESS = os.environ.get("TMC_ADDRESS", "127.0.0.1:50051")
engine = sa.create_engine(os.environ.get("SHOP_URL", "sqlite:///shop.db"))
tmc.create_tables(engine)
with engine.begin() as _connection:
    for _table in ("paid", "coupon"):
        _connection.execute(sa.text(f"CREATE TABLE IF NOT EXISTS {_table} (number INTEGER)"))

app = flask.Flask("shop")
center = tmc.connect(ADDRESS, app="orders", check_address=os.environ.get("SHOP_ADDRESS", ""))
app.wsgi_app = center.checks(engine).beside(app.wsgi_app)  # type: ignore[method-assign]  # POST /tmc/checks


@app.post("/orders/<int:number>/pay")
def pay(number: int) -> str:
    with Session(engine) as session, center.transaction(session) as tx:
        session.execute(sa.text("INSERT INTO paid VALUES (:number)"), {"number": number})
        tx.send("order.paid", {"order": number}, key=f"paid-{number}")
    return "paid\n"


def consume() -> None:
    consumer = tmc.Consumer(tmc.connect(ADDRESS, app="coupons"))

    @consumer.listener("order.paid", inbox=tmc.SqlInbox(sessionmaker(engine)))
    def give_coupon(paid: dict[str, int], session: Session) -> None:
        session.execute(sa.text("INSERT INTO coupon VALUES (:number)"), {"number": paid["order"]})

    consumer.run()


if __name__ == "__main__":
    consume()
