"""A gRPC service with a proto of its own and server reflection, as one would write it in Go or Java. No SDK, no stubs of ours.

Orders whose id ends in an odd digit are paid, in an even one cancelled, and `open` is still open. The center needs nothing
but its name: `tmc admin set-check` with kind reflection, see docs/checks.md.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection

SERVICE = "shop.v1.OrderService"
OPEN, PAID, CANCELLED = 1, 2, 3


def pool() -> descriptor_pool.DescriptorPool:
    """Describe the service as protoc would from its proto."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="orders.proto", package="shop.v1", syntax="proto3")
    status = file.enum_type.add(name="OrderStatus")
    for number, name in enumerate(("UNSPECIFIED", "OPEN", "PAID", "CANCELLED")):
        status.value.add(name=f"ORDER_STATUS_{name}", number=number)
    text = {"type": kinds.TYPE_STRING, "label": kinds.LABEL_OPTIONAL}
    file.message_type.add(name="GetOrderRequest").field.add(name="order_id", number=1, **text)
    order = file.message_type.add(name="Order")
    order.field.add(name="order_id", number=1, **text)
    enum = {"type": kinds.TYPE_ENUM, "type_name": ".shop.v1.OrderStatus", "label": kinds.LABEL_OPTIONAL}
    order.field.add(name="status", number=2, **enum)
    service = file.service.add(name="OrderService")
    service.method.add(name="GetOrder", input_type=".shop.v1.GetOrderRequest", output_type=".shop.v1.Order")
    made = descriptor_pool.DescriptorPool()
    made.Add(file)
    return made


def serve(port: int) -> Any:
    """A started server."""
    described = pool()
    asked = message_factory.GetMessageClass(described.FindMessageTypeByName("shop.v1.GetOrderRequest"))
    answer = message_factory.GetMessageClass(described.FindMessageTypeByName("shop.v1.Order"))

    def get_order(request: Any, _context: Any) -> Any:
        last = request.order_id[-1:]
        status = OPEN if request.order_id == "open" else PAID if last in "13579" else CANCELLED
        return answer(order_id=request.order_id, status=status)

    server = grpc.server(ThreadPoolExecutor(4))
    handler = grpc.unary_unary_rpc_method_handler(get_order, asked.FromString, answer.SerializeToString)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"GetOrder": handler})])
    reflection.enable_server_reflection([SERVICE, reflection.SERVICE_NAME], server, pool=described)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server
