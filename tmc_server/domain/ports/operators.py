"""Port for operators and their tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from tmc_server.domain.operators import Operator


class OperatorEditor(Protocol):
    """Changes to operators; each is one transaction with its audit row. All block. `actor`: the operator who does it.

    valid_ms: how long a token is valid, milliseconds; None: for ever.
    """

    def register(
        self, actor: str, new: Operator, valid_ms: int | None, reason: str, *, with_token: bool
    ) -> tuple[Operator, str]:
        """Returns: the operator, and the token ("": none was wanted, or the operator was there, with these rights).

        Raises NameTaken: it was there with other rights, or one of the identities is another operator's.
        """

    def update(
        self, actor: str, wanted: Operator, fields: Collection[str], reason: str, *, end_tokens: bool
    ) -> Operator:
        """end_tokens: refuse the tokens from now on.  fields: of role, topics, reads_bodies, identities.

        Raises OperatorUnknown, NameTaken: an identity is another operator's, InvalidField: it is the last administrator.
        """

    def rotate_token(
        self, actor: str, name: str, valid_ms: int | None, overlap_ms: int, reason: str
    ) -> tuple[Operator, str]:
        """overlap_ms: how long the token before stays valid. Raises OperatorUnknown."""

    def remove(self, actor: str, name: str, reason: str) -> None:
        """Raises OperatorUnknown, InvalidField: it is the last administrator."""

    def operators(self) -> Sequence[Operator]:
        """Return all operators, in the order of their names."""
