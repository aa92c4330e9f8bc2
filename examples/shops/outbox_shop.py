"""The outbox alone: no center, messages go from the shop's database to RabbitMQ."""

import json
import os
import sys

import pika
import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc

RABBITMQ = os.environ.get("SHOP_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672/%2F")
engine = sa.create_engine(os.environ.get("SHOP_URL", "sqlite:///shop.db"))


def prepare_database() -> None:
    tmc.create_tables(engine)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE IF NOT EXISTS paid (number INTEGER)"))
        connection.execute(sa.text("CREATE TABLE IF NOT EXISTS coupon (number INTEGER, message_id TEXT PRIMARY KEY)"))


def pay(outbox: tmc.Outbox, number: int) -> None:
    with Session(engine) as session, session.begin():
        session.execute(sa.text("INSERT INTO paid VALUES (:number)"), {"number": number})
        outbox.add(session, "order.paid", {"order": number}, key=f"paid-{number}")


def consume() -> None:
    """Without a center there is no inbox: the id of the message, the same in every copy, makes sure of one effect."""
    channel = pika.BlockingConnection(pika.URLParameters(RABBITMQ)).channel()
    channel.queue_declare("order.paid", durable=True)
    for method, properties, body in channel.consume("order.paid"):
        row = {"number": json.loads(body)["order"], "id": properties.message_id}
        with engine.begin() as connection:
            connection.execute(sa.text("INSERT INTO coupon VALUES (:number, :id) ON CONFLICT DO NOTHING"), row)
        channel.basic_ack(method.delivery_tag)


def main(what: str, number: str = "7") -> None:
    prepare_database()
    if what == "consume":
        consume()
    else:
        with tmc.Outbox(engine, tmc.RabbitTarget(RABBITMQ)) as outbox:  # its relay sends what a crash left behind
            pay(outbox, int(number))
            outbox.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
