"""Proposals in the catalog's database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.proposals import (
    VALID_MS,
    NewProposal,
    Proposal,
    ProposalAction,
    ProposalNumber,
    ProposalState,
)
from tmc_server.errors import ProposalClosed, ProposalUnknown
from tmc_server.store.auditing import act, record
from tmc_server.store.engines import Database, repeating
from tmc_server.store.records import record_of
from tmc_server.store.sql import number_of
from tmc_server.store.tables import proposal


class SqlProposals:
    """domain.ports.proposals.ProposalDesk."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @repeating
    def propose(self, new: NewProposal) -> Proposal:
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            pending = sa.select(proposal).where(*_pending(now), proposal.c.digest == new.digest)
            known = connection.execute(pending.order_by(proposal.c.id).limit(1)).one_or_none()
            if known is not None:
                return _proposal(known, now)
            values = {
                "action": new.action.value,
                "topic": new.topic,
                "subject": new.subject,
                "request": new.request,
                "digest": new.digest,
                "actor": new.actor,
                "reason": new.reason,
                "created_ms": now,
                "expires_ms": now + VALID_MS,
                "state": int(ProposalState.PENDING),
            }
            number = ProposalNumber(number_of(connection.execute(proposal.insert().values(values))))
            record(connection, act(now, new.actor, "propose", _audited(number, new.subject), reason=new.reason))
            return _proposal(connection.execute(_one(number)).one(), now)

    def proposal(self, number: ProposalNumber) -> Proposal:
        with self._database.reading() as connection:
            return _found(connection, number, self._database.now(connection))

    @repeating
    def decide(self, actor: str, number: ProposalNumber, state: ProposalState, reason: str) -> Proposal:
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            decided = {"state": int(state), "decided_by": actor, "decided_ms": now, "decision_reason": reason}
            change = proposal.update().where(proposal.c.id == number, *_pending(now)).values(decided)
            moved = connection.execute(change).rowcount
            found = _found(connection, number, now)
            if moved:
                action = "approve proposal" if state is ProposalState.APPROVED else "reject proposal"
                record(connection, act(now, actor, action, _audited(number, found.subject), reason=reason))
            elif found.state is not state or now >= found.expires_ms:
                raise ProposalClosed(f"Proposal {number} is {found.state.name.lower()}: make the call again.")
            return found

    def proposals(self, before: ProposalNumber | None, limit: int, *, pending_only: bool) -> Sequence[Proposal]:
        query = sa.select(proposal).order_by(proposal.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(proposal.c.id < before)
        with self._database.reading() as connection:
            now = self._database.now(connection)
            if pending_only:
                query = query.where(*_pending(now))
            return [_proposal(row, now) for row in connection.execute(query)]


def _pending(now: int) -> tuple[sa.ColumnElement[bool], ...]:
    return proposal.c.state == int(ProposalState.PENDING), proposal.c.expires_ms > now


def _audited(number: ProposalNumber, subject: str) -> str:
    return f"proposal {number}: {subject}"


def _one(number: ProposalNumber) -> sa.Select[Any]:
    return sa.select(proposal).where(proposal.c.id == number)


def _found(connection: sa.Connection, number: ProposalNumber, now: int) -> Proposal:
    """Raises ProposalUnknown."""
    row = connection.execute(_one(number)).one_or_none()
    if row is None:
        raise ProposalUnknown
    return _proposal(row, now)


def _proposal(row: Any, now: int) -> Proposal:
    proposal = record_of(Proposal, row, number=ProposalNumber(row.id), action=ProposalAction(row.action))
    is_expired = proposal.state is ProposalState.PENDING and now >= proposal.expires_ms
    return replace(proposal, state=ProposalState.EXPIRED) if is_expired else proposal
