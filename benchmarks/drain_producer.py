"""The producer's processes of the drain benchmark: endpoints that answer checks.

usage: drain_producer.py ledger ADDRESS DATABASE PORT KEY [PORT KEY ...]   the SDK's gRPC endpoint over a ledger, one per app
       drain_producer.py single|http|reflection PORT                       foreign endpoints: keys that end in 0 are rolled back
       drain_producer.py pages PORT                                        the same by CheckMany, in pages
       drain_producer.py hang PORT                                         takes every call and never answers

Each prints "ready" and serves until it is stopped.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import parse_qs, urlsplit

import grpc
from grpc_reflection.v1alpha import reflection_pb2

import tmc_client as tmc
from tests.support.rogue import _timestamp_file, shop_file
from tmc_common.protocol import check_pb2


def ledger(address: str, database: str, *ports_and_keys: str) -> None:
    import sqlalchemy as sa

    engine = sa.create_engine(database, pool_size=8, isolation_level="READ COMMITTED")
    for number, (port, key) in enumerate(zip(ports_and_keys[::2], ports_and_keys[1::2], strict=True)):
        center = tmc.connect(address, app=f"orders{number}", key=key)
        center.checks(engine).serve(f"127.0.0.1:{port}")
    _serve()


def _serve() -> None:
    print("ready", flush=True)
    threading.Event().wait()


def _committed(key: str) -> bool:
    return not key.endswith("0")


class _Foreign(grpc.GenericRpcHandler):
    """A service as written in another language. hangs: it takes calls and never answers.  pages: CheckMany too."""

    def __init__(self, *, hangs: bool, pages: bool) -> None:
        self._hangs = hangs
        self._pages = pages
        self._asked = check_pb2.CheckRequest.FromString

    def service(self, call):
        if self._hangs:
            return grpc.unary_unary_rpc_method_handler(lambda _data, _context: threading.Event().wait(600))
        methods = {
            **(
                {"/tmc.v1.CheckService/CheckMany": grpc.unary_unary_rpc_method_handler(self._many)}
                if self._pages
                else {}
            ),
            "/tmc.v1.CheckService/Check": grpc.unary_unary_rpc_method_handler(self._check),
            "/shop.v1.OrderService/GetOrder": grpc.unary_unary_rpc_method_handler(self._order),
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
                self._describe,
                reflection_pb2.ServerReflectionRequest.FromString,
                reflection_pb2.ServerReflectionResponse.SerializeToString,
            ),
        }
        return methods.get(call.method)

    def _check(self, data, _context):
        asked = self._asked(data)
        verdict = 1 if _committed(asked.key) else 2
        return check_pb2.CheckResponse(verdict=verdict, message_id=asked.message_id).SerializeToString()

    def _many(self, data, _context):
        answers = [
            check_pb2.CheckResponse(verdict=1 if _committed(asked.key) else 2, message_id=asked.message_id)
            for asked in check_pb2.CheckManyRequest.FromString(data).items
        ]
        return check_pb2.CheckManyResponse(results=answers).SerializeToString()

    def _order(self, data, _context):
        # GetOrderRequest{1: order_id} -> Order{2: Payment{1: status}}
        status = 1 if _committed(data[2:].decode()) else 2
        return bytes([0x12, 2, 8, status])

    def _describe(self, requests, _context):
        for request in requests:
            wanted = request.file_by_filename.startswith("google/")
            file = _timestamp_file() if wanted else shop_file().SerializeToString()
            answer = reflection_pb2.FileDescriptorResponse(file_descriptor_proto=[file])
            yield reflection_pb2.ServerReflectionResponse(file_descriptor_response=answer)


def foreign(port: str, *, hangs: bool, pages: bool) -> None:
    server = grpc.server(ThreadPoolExecutor(64 if hangs else 8))
    server.add_generic_rpc_handlers([_Foreign(hangs=hangs, pages=pages)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    _serve()


class _Verifying(asyncio.Protocol):
    """GET /verifyMessage?messageKey=.., connections kept: as little as a producer can do, so that the center is measured."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._asked = b""

    def data_received(self, data: bytes) -> None:
        self._asked += data
        while b"\r\n\r\n" in self._asked:
            head, _, self._asked = self._asked.partition(b"\r\n\r\n")
            target = head.split(b" ", 2)[1].decode()
            [key] = parse_qs(urlsplit(target).query)["messageKey"]
            verdict = b"2" if _committed(key) else b"3"
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 1\r\n\r\n" + verdict)


def http(port: str) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Verifying, "127.0.0.1", int(port))
        print("ready", flush=True)
        await server.serve_forever()

    asyncio.run(serve())


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    if mode == "ledger":
        ledger(*arguments)
    elif mode == "http":
        http(*arguments)
    else:
        foreign(*arguments, hangs=mode == "hang", pages=mode == "pages")
