"""What administrators do about operators: register, change, rotate tokens, remove."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Sequence

from tmc_server.domain.operators import IDENTITY_KINDS, Operator, Role
from tmc_server.domain.ports.operators import OperatorEditor
from tmc_server.domain.retry import DAY_MS
from tmc_server.errors import InvalidField, RoleRequired
from tmc_server.requests import validation
from tmc_server.requests.administering import Administering

CHANGEABLE = ("role", "topics", "reads_bodies", "identities")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}", re.ASCII)
_RESERVED = ("center", "developer")
_LONGEST_VALID_MS = 3_653 * DAY_MS
_MOST_TOPICS = 20
_LONGEST_PREFIX = 40
_MOST_IDENTITIES = 4


class Operators:
    """A change is answered when all servers know it."""

    def __init__(
        self,
        editor: OperatorEditor,
        administering: Administering,
        now_ms: Callable[[], int] = lambda: round(time.time() * 1000),
    ) -> None:
        self._editor = editor
        self._now_ms = now_ms
        self._change = administering.change
        self._change_with_key = administering.change_with_key

    async def register(
        self, actor: str, new: Operator, valid_ms: int, reason: str, *, with_token: bool
    ) -> tuple[Operator, str]:
        """valid_ms 0: the token does not expire. Raises InvalidField, NameTaken."""
        if not _NAME.fullmatch(new.name) or new.name in _RESERVED:
            raise InvalidField(
                "name", "be 1 to 64 characters of A-Z a-z 0-9 _ . @ -, and not a name of the center itself"
            )
        _check_rights(new, CHANGEABLE)
        valid = _valid(valid_ms)
        if not (with_token or new.identities):
            raise InvalidField("identities", "be given for an operator without a token")
        made, _ = await self._change_with_key(
            self._editor.register, actor, new, valid, validation.reason(reason), with_token=with_token
        )
        return made

    async def update(
        self, actor: str, wanted: Operator, fields: Collection[str], reason: str, *, end_tokens: bool = False
    ) -> Operator:
        """fields: those of CHANGEABLE that change.  end_tokens: also end the tokens. Raises InvalidField, OperatorUnknown."""
        validation.line(wanted.name, "name", 64, least=1)
        if not (fields or end_tokens) or not set(fields) <= set(CHANGEABLE):
            raise InvalidField("update_mask", f"name what is changed: {', '.join(CHANGEABLE)}")
        _check_rights(wanted, fields)
        changed, _ = await self._change(
            self._editor.update, actor, wanted, fields, validation.reason(reason), end_tokens=end_tokens
        )
        return changed

    async def rotate_token(
        self, operator: Operator, name: str, valid_ms: int, overlap_ms: int, reason: str
    ) -> tuple[Operator, str]:
        """name "": one's own. Raises InvalidField, RoleRequired: another's, or with a replaced token; OperatorUnknown."""
        if operator.by_replaced_token:  # who found an old one must not outlive it, nor push the owner's out
            raise RoleRequired("This token was replaced: use the newer one, or ask an administrator for another.")
        whose = validation.line(name, "name", 64) or operator.name
        if whose != operator.name and (operator.role < Role.ADMIN or operator.is_limited):
            raise RoleRequired(
                "Only an administrator of all topics makes tokens for others: leave the name out for your own."
            )
        valid = _valid(valid_ms)
        if whose == operator.name and operator.expires_ms is not None:
            left_ms = operator.expires_ms - self._now_ms()
            if left_ms <= 0:
                raise RoleRequired("You have no valid token that could be replaced: ask an administrator for one.")
            valid = _no_longer(left_ms, valid)
        overlap = validation.between(overlap_ms, "overlap_ms", 0, DAY_MS)
        made, _ = await self._change_with_key(
            self._editor.rotate_token, operator.name, whose, valid, overlap, validation.reason(reason)
        )
        return made

    async def remove(self, actor: str, name: str, reason: str) -> int:
        """Returns: time of effect. Raises OperatorUnknown, InvalidField."""
        validation.line(name, "name", 64, least=1)
        _, effective_ms = await self._change(self._editor.remove, actor, name, validation.reason(reason))
        return effective_ms

    async def operators(self) -> Sequence[Operator]:
        return await asyncio.to_thread(self._editor.operators)


def _check_identities(identities: Collection[str]) -> None:
    """Raises InvalidField."""
    if len(identities) > _MOST_IDENTITIES:
        raise InvalidField("identities", f"be at most {_MOST_IDENTITIES}")
    for each in identities:
        kind, _, name = each.partition(":")
        if kind not in IDENTITY_KINDS or not name:
            kinds = " or ".join(f"{kind}:NAME" for kind in IDENTITY_KINDS)
            raise InvalidField("identities", f"be {kinds}")
        validation.line(each, "identities", 100)


def _no_longer(left_ms: int, wanted_ms: int | None) -> int:
    """A token that expires does not prolong itself: an administrator does."""
    return max(1, left_ms if wanted_ms is None else min(left_ms, wanted_ms))


def _valid(valid_ms: int) -> int | None:
    return validation.between(valid_ms, "valid_ms", 0, _LONGEST_VALID_MS) or None


def _check_rights(wanted: Operator, fields: Collection[str]) -> None:
    """Raises InvalidField."""
    if "identities" in fields:
        _check_identities(wanted.identities)
    if "topics" not in fields:
        return
    if len(wanted.topics) > _MOST_TOPICS:
        raise InvalidField("topics", f"have at most {_MOST_TOPICS} prefixes")
    for prefix in wanted.topics:
        validation.topic(prefix, "topics")
        if len(prefix) > _LONGEST_PREFIX:
            raise InvalidField("topics", f"have prefixes of at most {_LONGEST_PREFIX} characters")
