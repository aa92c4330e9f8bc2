"""The audit trail: page by page, verified, and with a row for each look at a body."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from tmc_server.domain.ports.reading import AuditFilter, AuditTrail
from tmc_server.domain.views import OperatorAct, SealReport
from tmc_server.errors import InvalidField
from tmc_server.requests import validation
from tmc_server.requests.listing import Listing

_LONGEST = 300  # of a subject


class Auditing:
    """Answers who changed what."""

    def __init__(self, trail: AuditTrail) -> None:
        self._trail = trail

    async def read_body(self, actor: str, message_id: str) -> None:
        """Note that an operator reads the body of a message."""
        subject = f"message {validation.message_id(message_id).number}"
        await asyncio.to_thread(self._trail.add, actor, "read body", subject, "")

    async def verify(self) -> Sequence[SealReport]:
        """Verify the trail of each database, the catalog's first."""
        return await asyncio.to_thread(self._trail.verify)

    async def trail(
        self, wanted: AuditFilter, message_id: str, page_size: int, page_token: str
    ) -> Listing[OperatorAct]:
        """message_id: instead of a subject. Raises InvalidField."""
        for field in ("actor", "action", "subject"):
            if len(getattr(wanted, field)) > _LONGEST:
                raise InvalidField(field, f"have at most {_LONGEST} characters")
        for field in ("from_ms", "to_ms"):
            validation.between(getattr(wanted, field), field, 0, 2**53)
        if message_id:
            if wanted.subject:
                raise InvalidField("subject", "be left out: message_id names it")
            wanted = replace(wanted, subject=f"message {validation.message_id(message_id).number}")
        limit = validation.page_size(page_size)
        after = validation.numbers_token(page_token)
        rows, ends = await asyncio.to_thread(self._trail.page, wanted, after, limit)
        return Listing(rows=rows, next_token="-".join(map(str, ends)))
