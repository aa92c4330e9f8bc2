"""Operators: who may look, act and administer, and on which topics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

CERTIFICATE, OIDC = "certificate", "oidc"
IDENTITY_KINDS = (CERTIFICATE, OIDC)


class Role(IntEnum):
    """Each may do what those before it may. Numbers are stored and sent; never reuse one."""

    VIEWER = 1  #: looks
    OPERATOR = 2  #: acts on messages and deliveries
    ADMIN = 3  #: changes apps, keys, topics, subscriptions, checks and operators


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """topics: prefixes that the rights are limited to; empty: none.  reads_bodies: a right of its own, for every role.

    identities: what identifies the operator besides tokens, each KIND:NAME with a kind of IDENTITY_KINDS.
    expires_ms, previous_expires_ms: of the newest token and the one before; None: it does not expire, or there is none.
    by_replaced_token: the caller showed the one before, which is about to end.
    """

    name: str
    role: Role
    topics: tuple[str, ...] = ()
    reads_bodies: bool = False
    identities: tuple[str, ...] = ()
    expires_ms: int | None = None
    previous_expires_ms: int | None = None
    created_ms: int = 0
    by_replaced_token: bool = False

    @property
    def is_limited(self) -> bool:
        """Return whether there are topics that this operator may not see."""
        return bool(self.topics)

    def covers(self, topic: str) -> bool:
        """topic: its name."""
        return not self.topics or topic.startswith(self.topics)


def identity(kind: str, name: str) -> str:
    return f"{kind}:{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """What a token proves, until it expires. expires_ms None: for ever."""

    operator: Operator
    expires_ms: int | None = None

    def is_valid(self, now_ms: int) -> bool:
        return self.expires_ms is None or now_ms < self.expires_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownOperators:
    """Who may call. tokens: by their SHA-256.  identities: operators by what identifies them besides tokens."""

    tokens: Mapping[bytes, Token] = field(default_factory=dict)
    identities: Mapping[str, Operator] = field(default_factory=dict)
