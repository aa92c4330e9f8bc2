"""A producer without our SDK: it talks to the center over its protos alone and answers checks by plain HTTP.

usage: plain_http.py ADDRESS PORT [APP KEY]

It takes orders by POST /orders/NUMBER and never sends half of its submits, as if the process had been killed in
between. GET /verifyMessage?bizID=..&messageKey=.. returns to the center, from its own table, what became of an order.
Answers are 1 prepared, 2 commit, 3 rollback, 4 unknown. There is no fence: an order that is not in the table is 4,
because it may still come, and 3 only once its number was closed for good.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import grpc

from tmc_common.protocol import message_pb2, message_pb2_grpc

COMMIT, ROLLBACK, UNKNOWN = "2", "3", "4"


class Orders:
    """The business: a table, and the order of steps that keeps its answers correct."""

    def __init__(self, center: message_pb2_grpc.MessageServiceStub, metadata: list[tuple[str, str]]) -> None:
        self._center = center
        self._metadata = metadata
        self._database = sqlite3.connect("file:orders?mode=memory&cache=shared", uri=True, check_same_thread=False)
        self._database.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY, state TEXT NOT NULL)")

    def take(self, number: int, *, paid: bool, submit: bool) -> str:
        """Prepare, local transaction, submit. Returns: the message id."""
        request = message_pb2.PrepareRequest(
            topic="foreign.paid", key=f"order-{number}", body=b"{}", attempt_id=os.urandom(16)
        )
        prepared = self._center.Prepare(request, metadata=self._metadata, timeout=5)
        with self._database:
            state = "paid" if paid else "cancelled"
            self._database.execute("INSERT INTO orders VALUES (?, ?)", (number, state))
        if submit:
            if paid:
                submit_request = message_pb2.SubmitRequest(message_id=prepared.message_id)
                self._center.Submit(submit_request, metadata=self._metadata, timeout=5)
            else:
                rollback = message_pb2.RollbackRequest(message_id=prepared.message_id)
                self._center.Rollback(rollback, metadata=self._metadata, timeout=5)
        return prepared.message_id

    def outcome(self, key: str) -> str:
        """What became of the order; for the center."""
        number = key.removeprefix("order-")
        if not number.isdigit():
            return UNKNOWN  # no order of ours; the center tries an endpoint out with the key tmc-examine
        found = self._database.execute("SELECT state FROM orders WHERE number = ?", (int(number),)).fetchone()
        return {None: UNKNOWN, ("paid",): COMMIT, ("cancelled",): ROLLBACK}[found]


def serve(address: str, port: int, app: str, key: str) -> ThreadingHTTPServer:
    """The shop's web server, not started yet."""
    metadata = [("tmc-app", app), ("tmc-check-address", f"127.0.0.1:{port}")]
    if key:
        metadata.append(("authorization", f"Bearer {key}"))
    orders = Orders(message_pb2_grpc.MessageServiceStub(grpc.insecure_channel(address)), metadata)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            if asked.path != "/verifyMessage":
                self.send_error(404)
                return
            self._answer(orders.outcome(parse_qs(asked.query)["messageKey"][0]))

        def do_POST(self) -> None:
            number = int(self.path.rpartition("/")[2])
            self._answer(orders.take(number, paid=number % 3 != 0, submit=number % 2 == 0))

        def _answer(self, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Quiet."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    center, port, *who = sys.argv[1:]
    serve(center, int(port), *(who or ["foreign-shop", ""])).serve_forever()
