"""The RPCs about operators."""

from __future__ import annotations

from typing import Any

from tmc_common.protocol import admin_pb2
from tmc_server.domain.operators import Operator, Role
from tmc_server.requests.listing import listed
from tmc_server.rpc.admin_parts import AdminParts
from tmc_server.rpc.filling import filled, named


class OperatorServicer(AdminParts):
    """The part of AdminService about operators. Methods take the operator who calls and a request."""

    async def WhoAmI(self, operator: Operator, _request: Any) -> Any:
        return _operator_to(operator)

    async def RegisterOperator(self, operator: Operator, request: admin_pb2.RegisterOperatorRequest) -> Any:
        new = _operator_from(request, named(Role, request.role, "role"))
        made, token = await self.operators.register(
            operator.name, new, request.valid_ms, request.reason, with_token=not request.without_token
        )
        return admin_pb2.RegisterOperatorResponse(operator=_operator_to(made), token=token)

    async def UpdateOperator(self, operator: Operator, request: admin_pb2.UpdateOperatorRequest) -> Any:
        fields = list(request.update_mask.paths)
        wanted = _operator_from(request, named(Role, request.role, "role") if "role" in fields else Role.VIEWER)
        changed = await self.operators.update(
            operator.name, wanted, fields, request.reason, end_tokens=request.without_token
        )
        return _operator_to(changed)

    async def RotateOperatorToken(self, operator: Operator, request: admin_pb2.RotateOperatorTokenRequest) -> Any:
        made, token = await self.operators.rotate_token(
            operator, request.name, request.valid_ms, request.overlap_ms, request.reason
        )
        return admin_pb2.RotateOperatorTokenResponse(operator=_operator_to(made), token=token)

    async def RemoveOperator(self, operator: Operator, request: admin_pb2.RemoveOperatorRequest) -> Any:
        effective_ms = await self.operators.remove(operator.name, request.name, request.reason)
        return admin_pb2.RemoveOperatorResponse(effective_ms=effective_ms)

    async def ListOperators(self, _operator: Operator, request: admin_pb2.ListOperatorsRequest) -> Any:
        found = await self.operators.operators()
        page = listed(found, lambda each: each.name, request.page_size, request.page_token)
        return admin_pb2.ListOperatorsResponse(operators=map(_operator_to, page.rows), next_page_token=page.next_token)


def _operator_from(sent: Any, role: Role) -> Operator:
    return Operator(
        name=sent.name,
        role=role,
        topics=tuple(sorted(set(sent.topics))),
        reads_bodies=sent.reads_bodies,
        identities=tuple(sorted(set(sent.identities))),
    )


def _operator_to(operator: Operator) -> admin_pb2.Operator:
    return filled(admin_pb2.Operator, operator)
