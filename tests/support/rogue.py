"""Producers that answer badly: an HTTP server and a gRPC server with every bad habit that could be thought of."""

from __future__ import annotations

import contextlib
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2

from tmc_common.protocol import check_pb2

CRLF = b"\r\n"


def _reply(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@cache
def _bomb() -> bytes:
    packer = zlib.compressobj(1, wbits=31)
    return b"".join(packer.compress(b"2" * 1_000_000) for _ in range(60)) + packer.flush()


class RogueHttp:
    """One thread per connection; the path says how it behaves. `asked`: request lines, `closed` when a client gave up."""

    def __init__(self, trap_port: int = 1) -> None:
        self.trap_port = trap_port
        _bomb()  # made before anybody's deadline runs
        self.asked: list[str] = []
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self.stopping = threading.Event()
        self.answers: dict[str, Callable[[socket.socket, bytes], None]] = {}
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, AttributeError):
            head, _, body = self._read(connection)
            line = head.split(CRLF, 1)[0].decode()
            self.asked.append(line)
            self.heads.append(head)
            self.bodies.append(body)
            mode = line.split(" ")[1].partition("?")[0].strip("/")
            if mode in self.answers:
                self.answers[mode](connection, body)
            else:
                getattr(self, f"do_{mode}")(connection)

    @staticmethod
    def _read(connection: socket.socket) -> tuple[bytes, bytes, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(65_536) or _stop()
        head, separator, body = data.partition(b"\r\n\r\n")
        for line in head.split(CRLF):
            if line.lower().startswith(b"content-length:"):
                while len(body) < int(line.split(b":")[1]):
                    body += connection.recv(65_536) or _stop()
        return head, separator, body

    def do_hang(self, _connection: socket.socket) -> None:
        self.stopping.wait(60)

    def do_drip(self, connection: socket.socket) -> None:
        """A byte at a time: every single read is in time, the whole never is."""
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not self.stopping.wait(0.02):
            connection.sendall(b"2")

    def do_drip_head(self, connection: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 1_000_000:
            connection.sendall(bytes([byte]))
            if self.stopping.wait(0.02):
                return

    def do_many_headers(self, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while not self.stopping.is_set():
            connection.sendall(b"X-A: bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\r\n" * 1000)

    def do_hints(self, connection: socket.socket) -> None:
        """Interim answers without end: each is well-formed, the answer itself never comes."""
        while not self.stopping.is_set():
            connection.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: " + b"a" * 60_000 + b"\r\n\r\n")

    def do_hangs_up(self, connection: socket.socket) -> None:
        """Offers to keep the connection, and closes it."""
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n2")

    def do_huge(self, connection: socket.socket) -> None:
        """One GiB, as fast as it is taken."""
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n")
        for _ in range(16_384):
            connection.sendall(b"2" * 65_536)

    def do_huge_chunked(self, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(16_384):
            connection.sendall(b"10000\r\n" + b"2" * 65_536 + CRLF)

    def do_bomb(self, connection: socket.socket) -> None:
        """60 kB that swell to 60 MB."""
        connection.sendall(_reply(_bomb(), "200 OK", "Content-Encoding: gzip"))

    def do_redirect(self, connection: socket.socket) -> None:
        connection.sendall(_reply(b"", "302 Found", f"Location: http://127.0.0.1:{self.trap_port}/"))

    def do_redirect_permanent(self, connection: socket.socket) -> None:
        connection.sendall(_reply(b"2", "308 Permanent Redirect", f"Location: http://127.0.0.1:{self.trap_port}/"))

    def do_error(self, connection: socket.socket) -> None:
        connection.sendall(_reply(b"2", "500 Oops"))

    def do_created(self, connection: socket.socket) -> None:
        connection.sendall(_reply(b"2", "201 Created"))

    def do_gone(self, connection: socket.socket) -> None:
        connection.sendall(_reply(b"2", "404 Gone"))

    def do_noise(self, connection: socket.socket) -> None:
        connection.sendall(b"2")

    def do_cut(self, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n2")

    def do_reset(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def say(self, mode: str, body: bytes) -> None:
        """From now on `mode` answers 200 with this body."""
        self.answers[mode] = lambda connection, _asked: connection.sendall(_reply(body))

    def stop(self) -> None:
        self.stopping.set()
        self._listener.close()


def _stop() -> bytes:
    raise ValueError("the client went away")


class TrapListener:
    """Nobody should ever connect here."""

    def __init__(self) -> None:
        self.connections = 0
        self._listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._listener.accept()[0].close()
                self.connections += 1

    def stop(self) -> None:
        self._listener.close()


def shop_file() -> descriptor_pb2.FileDescriptorProto:
    """A foreign service: shop.v1.OrderService, of which the center has no stubs."""
    file = descriptor_pb2.FileDescriptorProto(name="shop/v1/orders.proto", package="shop.v1", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    status = file.enum_type.add(name="Status")
    for number, name in enumerate(("STATUS_NONE", "STATUS_PAID", "STATUS_CANCELLED", "STATUS_OPEN")):
        status.value.add(name=name, number=number)
    kinds = descriptor_pb2.FieldDescriptorProto
    asked = file.message_type.add(name="GetOrderRequest")
    asked.field.add(name="order_id", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    asked.field.add(name="tags", number=2, type=kinds.TYPE_STRING, label=kinds.LABEL_REPEATED)
    inner = file.message_type.add(name="Payment")
    inner.field.add(
        name="status", number=1, type=kinds.TYPE_ENUM, type_name=".shop.v1.Status", label=kinds.LABEL_OPTIONAL
    )
    order = file.message_type.add(name="Order")
    order.field.add(name="order_id", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    order.field.add(
        name="payment", number=2, type=kinds.TYPE_MESSAGE, type_name=".shop.v1.Payment", label=kinds.LABEL_OPTIONAL
    )
    order.field.add(name="done", number=3, type=kinds.TYPE_BOOL, label=kinds.LABEL_OPTIONAL)
    order.field.add(name="code", number=4, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
    order.field.add(
        name="paid_at",
        number=5,
        type=kinds.TYPE_MESSAGE,
        type_name=".google.protobuf.Timestamp",
        label=kinds.LABEL_OPTIONAL,
    )
    order.field.add(name="notes", number=6, type=kinds.TYPE_STRING, label=kinds.LABEL_REPEATED)
    order.field.add(
        name="exact", number=7, type=kinds.TYPE_INT32, label=kinds.LABEL_OPTIONAL, proto3_optional=True, oneof_index=0
    )
    order.oneof_decl.add(name="_exact")
    service = file.service.add(name="OrderService")
    service.method.add(name="GetOrder", input_type=".shop.v1.GetOrderRequest", output_type=".shop.v1.Order")
    service.method.add(
        name="Watch", input_type=".shop.v1.GetOrderRequest", output_type=".shop.v1.Order", server_streaming=True
    )
    return file


def _chain(file: descriptor_pb2.FileDescriptorProto, length: int) -> descriptor_pb2.FileDescriptorProto:
    """With a request that reaches that many messages, one inside the other."""
    made = descriptor_pb2.FileDescriptorProto()
    made.CopyFrom(file)
    asked = made.service[0].method[0].input_type.rpartition(".")[2]
    first = next(message for message in made.message_type if message.name == asked)
    kinds = descriptor_pb2.FieldDescriptorProto
    for number in range(length):
        field = first.field.add(name="next", number=900, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_MESSAGE)
        field.type_name = f".{made.package}.Chained{number}"
        first = made.message_type.add(name=f"Chained{number}")
    return made


def _timestamp_file() -> bytes:
    from google.protobuf import timestamp_pb2

    data: bytes = timestamp_pb2.DESCRIPTOR.serialized_pb
    return data


class RogueGrpc:
    """CheckService, a foreign OrderService and reflection. mode: how checks are answered; describe: how it describes itself."""

    def __init__(self) -> None:
        self.mode = "commit"
        self.describe = "v1"
        self.order: dict[str, Any] = {}
        self.calls: list[str] = []
        self.tokens: list[str] = []
        self.described = 0
        self.stopping = threading.Event()
        self.file = shop_file()
        self._server = grpc.server(ThreadPoolExecutor(64))
        self._server.add_generic_rpc_handlers([_Everything(self)])
        self.port: int = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def order_class(self) -> Any:
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(_timestamp_file())
        pool.Add(self.file)
        return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.v1.Order"))

    def stop(self) -> None:
        self.stopping.set()
        self._server.stop(0)

    # -- checks ---------------------------------------------------------------------------------------------------

    def check_many(self, data: bytes, context: Any) -> bytes:
        items = check_pb2.CheckManyRequest.FromString(data).items
        if self.mode == "single":
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "only Check")
        if self.mode in ("one less", "junk", "large"):
            return {
                "one less": check_pb2.CheckManyResponse().SerializeToString(),
                "junk": b"\xff\xff\xff",
                "large": b"\x0a\xff\xff\x7f" + b"2" * (2 << 20),
            }[self.mode]
        results = [self._answer(item, context) for item in items]
        return check_pb2.CheckManyResponse(results=results).SerializeToString()

    def check(self, data: bytes, context: Any) -> bytes:
        return self._answer(check_pb2.CheckRequest.FromString(data), context).SerializeToString()

    def _answer(self, item: check_pb2.CheckRequest, context: Any) -> check_pb2.CheckResponse:
        if self.mode == "hang":
            self.stopping.wait(30)
        if self.mode == "poison" and item.key == "poison":
            raise RuntimeError("poisoned")
        if self.mode in ("denied", "internal", "unavailable", "exhausted"):
            code = {
                "denied": grpc.StatusCode.PERMISSION_DENIED,
                "internal": grpc.StatusCode.INTERNAL,
                "unavailable": grpc.StatusCode.UNAVAILABLE,
                "exhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
            }[self.mode]
            context.abort(code, "rogue")
        verdict = {"rollback": 2, "unknown": 3, "unspecified": 0, "seven": 7}.get(self.mode, 1)
        other = {"other": "9-9-09-9", "nameless": ""}.get(self.mode, item.message_id)
        return check_pb2.CheckResponse(verdict=verdict, message_id=other)  # type: ignore[arg-type]

    # -- a foreign method -----------------------------------------------------------------------------------------

    def get_order(self, data: bytes, context: Any) -> bytes:
        if self.mode == "hang":
            self.stopping.wait(30)
        if self.mode == "unimplemented":
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "gone")
        if self.mode == "junk":
            return b"\xff\xff\xff"
        if self.mode == "large":
            return b"\x32\xff\xff\x07" + b"2" * 131_071
        order = self.order_class()()
        values = dict(self.order)
        if "payment" in values:
            order.payment.status = values.pop("payment")
        if "paid_at" in values:
            order.paid_at.seconds = values.pop("paid_at")
        for name, value in values.items():
            getattr(order, name).extend(value) if name == "notes" else setattr(order, name, value)
        made: bytes = order.SerializeToString()
        return made

    # -- reflection -----------------------------------------------------------------------------------------------

    def reflect(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self.described += 1
        for number, request in enumerate(requests):
            yield self._described(request, number, context)

    def _described(self, request: Any, number: int, context: Any) -> Any:
        def files(*data: bytes) -> Any:
            answer = reflection_pb2.FileDescriptorResponse(file_descriptor_proto=data)
            return reflection_pb2.ServerReflectionResponse(file_descriptor_response=answer)

        mode, wanted = self.describe, request.file_by_filename
        if mode == "hang":
            self.stopping.wait(30)
        if mode == "breaks":
            context.abort(grpc.StatusCode.INTERNAL, "rogue")
        if mode == "junk":
            return files(b"\xff\xff\xff")
        if mode == "many files":
            return files(
                *(descriptor_pb2.FileDescriptorProto(name=f"f{i}").SerializeToString() for i in range(100_000))
            )
        if mode == "large":
            return files(descriptor_pb2.FileDescriptorProto(name="x" * (1 << 20)).SerializeToString())
        if mode == "deep":  # each file imports one more
            name = f"deep{number}.proto"
            return files(
                descriptor_pb2.FileDescriptorProto(
                    name=name, dependency=[f"deep{number + 1}.proto"]
                ).SerializeToString()
            )
        if mode == "chain" and not wanted.startswith("google/"):  # each message has a field of the next one
            return files(_chain(self.file, 500).SerializeToString())
        if mode == "circle":
            name, other = ("a.proto", "b.proto") if wanted != "b.proto" else ("b.proto", "a.proto")
            return files(descriptor_pb2.FileDescriptorProto(name=name, dependency=[other]).SerializeToString())
        if mode == "missing import" and wanted:
            error = reflection_pb2.ErrorResponse(error_code=5, error_message="no such file")
            return reflection_pb2.ServerReflectionResponse(error_response=error)
        if wanted.startswith("google/"):
            return files(_timestamp_file())
        if request.file_containing_symbol not in ("", "shop.v1.OrderService"):
            error = reflection_pb2.ErrorResponse(error_code=5, error_message="no such symbol")
            return reflection_pb2.ServerReflectionResponse(error_response=error)
        return files(self.file.SerializeToString())


@contextlib.contextmanager
def proxy_without_anybody_behind() -> Iterator[tuple[int, list[str]]]:
    """Take each connection and close it, until the end of the block. Yields its port, and by whom connections were made."""
    taken: list[str] = []

    def close() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, peer = proxy.accept()
                connection.close()
                taken.append(str(peer))

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        yield proxy.getsockname()[1], taken
        proxy.shutdown(socket.SHUT_RDWR)
        thread.join()


class _Everything(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Requests and answers as bytes."""

    def __init__(self, rogue: RogueGrpc) -> None:
        self._rogue = rogue

    def service(self, call: Any) -> Any:
        rogue, path = self._rogue, call.method
        rogue.calls.append(path)
        rogue.tokens.append(dict(call.invocation_metadata).get("tmc-check-token", ""))
        unary = {
            "/tmc.v1.CheckService/CheckMany": rogue.check_many,
            "/tmc.v1.CheckService/Check": rogue.check,
            "/shop.v1.OrderService/GetOrder": rogue.get_order,
        }.get(path)
        if unary is not None and not (rogue.mode == "no service" and "CheckService" in path):
            return grpc.unary_unary_rpc_method_handler(unary)
        reflection = {"v1alpha": "v1alpha", "absent": "none"}.get(rogue.describe, "v1")
        if path == f"/grpc.reflection.{reflection}.ServerReflection/ServerReflectionInfo":
            return grpc.stream_stream_rpc_method_handler(
                rogue.reflect,
                reflection_pb2.ServerReflectionRequest.FromString,
                reflection_pb2.ServerReflectionResponse.SerializeToString,
            )
        return None
