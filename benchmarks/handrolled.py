"""What one writes without a center: an outbox table, a relay, a consumer; on the same MariaDB and RabbitMQ.

naive: one row per transaction; the relay publishes one message, waits for its confirm, marks its row, commits; the consumer
acks one by one.  batched: transactions of 100 rows, pages of 500, pipelined confirms, one update per page, acks by 50.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import MySQLdb
import pika
from pika.adapters.select_connection import SelectConnection

from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.rabbitmq import RabbitMQ

QUEUE = "handrolled"
BODY = os.urandom(256)


def messages_per_s(server: MariaDB, broker: RabbitMQ, count: int, batched: bool) -> float:
    """From the first insert to the last ack, producers, relay and consumer in processes of their own."""
    import multiprocessing

    prepare(server, broker)
    context = multiprocessing.get_context("spawn")
    go = context.Event()
    ready = context.Semaphore(0)
    arguments = (server.port, broker.url, count, batched, go, ready)
    processes = [context.Process(target=target, args=arguments) for target in (_produce, _relay)]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    began = time.monotonic()
    go.set()
    consume(broker.url, count, batched)
    elapsed = time.monotonic() - began
    for process in processes:
        process.join(30)
    return count / elapsed


def _connect(port: int) -> Any:
    return MySQLdb.connect(host="127.0.0.1", port=port, user="root", db="tmc_handrolled", autocommit=False)


def prepare(server: MariaDB, broker: RabbitMQ) -> None:
    setup = MySQLdb.connect(host="127.0.0.1", port=server.port, user="root", autocommit=True)
    with setup.cursor() as cursor:
        cursor.execute("CREATE DATABASE IF NOT EXISTS tmc_handrolled")
        setup.select_db("tmc_handrolled")
        cursor.execute(
            "CREATE OR REPLACE TABLE outbox (id BIGINT AUTO_INCREMENT PRIMARY KEY, message_key VARCHAR(128) NOT NULL UNIQUE,"
            " body BLOB, sent TINYINT NOT NULL DEFAULT 0, KEY unsent (sent, id)) ENGINE=InnoDB"
        )
    setup.close()
    connection = broker.connect()
    channel = connection.channel()
    channel.queue_delete(QUEUE)
    channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    connection.close()


def _produce(port: int, _url: str, count: int, batched: bool, go: Any, ready: Any) -> None:
    threads, step = producers(batched)

    def work(first: int, last: int) -> None:
        connection = _connect(port)
        cursor = connection.cursor()
        for start in range(first, last, step):
            rows = [(f"k{number}", BODY) for number in range(start, min(start + step, last))]
            cursor.executemany("INSERT INTO outbox (message_key, body) VALUES (%s, _binary %s)", rows)
            connection.commit()
        connection.close()

    ready.release()
    go.wait()
    shared(work, count, threads)


def producers(batched: bool) -> tuple[int, int]:
    """Threads, and messages per transaction."""
    return (2, 100) if batched else (16, 1)


def shared(work: Callable[[int, int], None], count: int, threads: int) -> None:
    """Call work(first, last) in this many threads, for parts of range(count), and wait for them."""
    bounds = [count * number // threads for number in range(threads + 1)]
    workers = [threading.Thread(target=work, args=pair) for pair in itertools.pairwise(bounds)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _relay(port: int, url: str, count: int, batched: bool, go: Any, ready: Any) -> None:
    connection = _connect(port)
    cursor = connection.cursor()
    if batched:
        _relay_pages(connection, cursor, url, count, lambda: (ready.release(), go.wait()))
        return
    broker = pika.BlockingConnection(pika.URLParameters(url))
    channel = broker.channel()
    channel.confirm_delivery()
    ready.release()
    go.wait()
    sent = 0
    while sent < count:
        cursor.execute("SELECT id, body FROM outbox WHERE sent = 0 ORDER BY id LIMIT 100")
        rows = cursor.fetchall()
        connection.commit()
        for number, body in rows:
            properties = pika.BasicProperties(delivery_mode=2, message_id=str(number))
            channel.basic_publish("", QUEUE, body, properties, mandatory=True)
            cursor.execute("UPDATE outbox SET sent = 1 WHERE id = %s", (number,))
            connection.commit()
            sent += 1
        if not rows:
            time.sleep(0.005)
    broker.close()


def _relay_pages(connection: Any, cursor: Any, url: str, count: int, await_start: Callable[[], object]) -> None:
    """Publish a page, wait for all its confirms, mark it with one statement."""
    state: dict[str, Any] = {"sent": 0, "tag": 0, "open": {}, "page": []}

    def next_page() -> None:
        cursor.execute("SELECT id, body FROM outbox WHERE sent = 0 ORDER BY id LIMIT 500")
        state["page"] = cursor.fetchall()
        connection.commit()
        if not state["page"]:
            if state["sent"] >= count:
                broker.close()
            else:
                broker.ioloop.call_later(0.005, next_page)
            return
        for number, body in state["page"]:
            state["tag"] += 1
            state["open"][state["tag"]] = number
            properties = pika.BasicProperties(delivery_mode=2, message_id=str(number))
            state["channel"].basic_publish("", QUEUE, body, properties, mandatory=True)

    def on_confirm(frame: Any) -> None:
        tag, still_open = frame.method.delivery_tag, state["open"]
        if frame.method.multiple:
            for done in [known for known in still_open if known <= tag]:
                del still_open[done]
        else:
            still_open.pop(tag, None)
        if not still_open:
            numbers = [number for number, _ in state["page"]]
            cursor.execute(f"UPDATE outbox SET sent = 1 WHERE id IN ({','.join(map(str, numbers))})")
            connection.commit()
            state["sent"] += len(numbers)
            next_page()

    def on_channel(channel: Any) -> None:
        state["channel"] = channel
        channel.confirm_delivery(on_confirm)
        await_start()
        next_page()

    broker = SelectConnection(
        pika.URLParameters(url),
        on_open_callback=lambda opened: opened.channel(on_open_callback=on_channel),
        on_close_callback=lambda closed, _reason: closed.ioloop.stop(),
    )
    broker.ioloop.start()


def consume(url: str, count: int, batched: bool) -> None:
    broker = pika.BlockingConnection(pika.URLParameters(url))
    channel = broker.channel()
    channel.basic_qos(prefetch_count=300)
    got = 0
    for method, _properties, _body in channel.consume(QUEUE, inactivity_timeout=1):
        if method is None:
            continue
        got += 1
        if not batched or got % 50 == 0 or got >= count:
            channel.basic_ack(method.delivery_tag, multiple=True)
        if got >= count:
            break
    broker.close()
