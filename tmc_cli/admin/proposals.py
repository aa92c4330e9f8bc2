"""Admin commands about what needs two operators."""

from __future__ import annotations

from typing import Annotated

import typer

from tmc_cli.admin.calling import Reason, call
from tmc_common.protocol import admin_pb2


def list_proposals(
    context: typer.Context,
    pending: Annotated[bool, typer.Option("--pending", help="Only those that can be approved now.")] = False,
    page_size: int = 20,
    page_token: str = "",
) -> None:
    """List what needs the approval of a second operator, newest first."""
    request = admin_pb2.ListProposalsRequest(pending_only=pending, page_size=page_size, page_token=page_token)
    call(context, "ListProposals", request, admin_pb2.ListProposalsResponse)


def approve(context: typer.Context, proposal: int, reason: Reason) -> None:
    """Approve what another operator proposed, and do it."""
    request = admin_pb2.ApproveProposalRequest(proposal=proposal, reason=reason)
    call(context, "ApproveProposal", request, admin_pb2.ApproveProposalResponse)


def reject(context: typer.Context, proposal: int, reason: Reason) -> None:
    """Reject what another operator proposed, or withdraw your own proposal."""
    request = admin_pb2.RejectProposalRequest(proposal=proposal, reason=reason)
    call(context, "RejectProposal", request, admin_pb2.Proposal)
