"""Plain sqlite3: no ORM, no framework."""

import os
import sqlite3
import sys

import tmc_client as tmc


def connect() -> sqlite3.Connection:
    return sqlite3.connect(os.environ.get("SHOP_DATABASE", "shop.db"))


def prepare_database() -> None:
    tmc.create_tables(connect)
    connection = connect()
    connection.execute("CREATE TABLE IF NOT EXISTS paid (number INTEGER)")
    connection.execute("CREATE TABLE IF NOT EXISTS coupon (number INTEGER)")
    connection.close()


def pay(center: tmc.Center, number: int) -> None:
    center.resume(connect)  # what a crash left behind
    connection = connect()
    with center.transaction(connection) as tx:
        connection.execute("INSERT INTO paid VALUES (?)", (number,))
        tx.send("order.paid", {"order": number}, key=f"paid-{number}")
    connection.close()


def coupons(center: tmc.Center) -> tmc.Consumer:
    consumer = tmc.Consumer(center)

    @consumer.listener("order.paid", inbox=tmc.SqlInbox(connect))
    def give_coupon(paid: dict[str, int], connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO coupon VALUES (?)", (paid["order"],))

    return consumer


def numbers(table: str) -> list[int]:
    connection = connect()
    found = [number for (number,) in connection.execute(f"SELECT number FROM {table} ORDER BY number")]
    connection.close()
    return found


def main(what: str, number: str = "7") -> None:
    prepare_database()
    app = "orders" if what == "pay" else "coupons"
    with tmc.connect(os.environ.get("TMC_ADDRESS", "127.0.0.1:50051"), app=app) as center:
        if what == "consume":
            coupons(center).run()
        else:
            pay(center, int(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
