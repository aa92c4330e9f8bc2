"""The effect is a Celery task: the handler enqueues it, then its message is acked.

If Celery's broker is away, the handler fails and the center delivers again. If the process dies before the ack, the task is
enqueued a second time: the id of the message in the coupon's row makes sure of one effect.
"""

import os
import sys
from pathlib import Path

import celery
import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc

ADDRESS = os.environ.get("TMC_ADDRESS", "127.0.0.1:50051")
engine = sa.create_engine(os.environ.get("SHOP_URL", "sqlite:///shop.db"))

app = celery.Celery("shop", broker=os.environ.get("CELERY_BROKER", "amqp://guest:guest@127.0.0.1/"))
if app.conf.broker_url == "filesystem://":  # a folder instead of a broker, for the test of this example
    folder = Path(os.environ["CELERY_FOLDER"])
    tasks = folder / "tasks"
    tasks.mkdir(exist_ok=True)
    app.conf.broker_transport_options = {
        "data_folder_in": tasks,
        "data_folder_out": tasks,
        "control_folder": folder / "control",
    }


def prepare_database() -> None:
    tmc.create_tables(engine)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE IF NOT EXISTS paid (number INTEGER)"))
        connection.execute(sa.text("CREATE TABLE IF NOT EXISTS coupon (number INTEGER, message_id TEXT PRIMARY KEY)"))


@app.task(name="shop.give_coupon", acks_late=True)
def give_coupon(number: int, message_id: str) -> None:
    with engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO coupon VALUES (:number, :id) ON CONFLICT DO NOTHING"),
            {"number": number, "id": message_id},
        )


def pay(center: tmc.Center, number: int) -> None:
    with Session(engine) as session, center.transaction(session) as tx:
        session.execute(sa.text("INSERT INTO paid VALUES (:number)"), {"number": number})
        tx.send("order.paid", {"order": number}, key=f"paid-{number}")


def consume() -> None:
    consumer = tmc.Consumer(tmc.connect(ADDRESS, app="coupons"))

    @consumer.listener("order.paid")
    def enqueue(paid: dict[str, int], message: tmc.Message) -> None:
        for _ in range(2):  # as after a crash between the two
            give_coupon.delay(paid["order"], message.id)

    consumer.run()


def main(what: str, number: str = "7") -> None:
    prepare_database()
    if what == "consume":
        consume()
    else:
        with tmc.connect(ADDRESS, app="orders") as center:
            pay(center, int(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
