"""Operators and their tokens in SQL. A token is stored as its SHA-256 only."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from tmc_common.eventlog import EventLog
from tmc_server.domain.operators import KnownOperators, Operator, Role, Token
from tmc_server.errors import InvalidField, NameTaken, OperatorUnknown
from tmc_server.store.auditing import differences
from tmc_server.store.catalog_changes import CatalogChanges, hash_of, new_key
from tmc_server.store.engines import repeating
from tmc_server.store.tables import operator

log = EventLog("tmc.catalog")

FIRST_OPERATOR = "admin"


class OperatorStore(CatalogChanges):
    """domain.ports.operators.OperatorEditor."""

    def make_first(self, replace: bool = False) -> str | None:
        """The first operator's token. None: there is one already; `replace` makes a new one, with all rights."""
        first = Operator(name=FIRST_OPERATOR, role=Role.ADMIN, reads_bodies=True)
        with self._database.reading() as connection:
            if _find(connection, first.name) is not None and not replace:
                return None
        return self._make_first(first, replace)

    @repeating
    def _make_first(self, first: Operator, replace: bool) -> str | None:
        token = new_key()
        with self._change(first.name, "make operator", first.name) as (connection, now):
            if _find(connection, first.name) is not None and not replace:
                return None
            connection.execute(operator.delete().filter_by(name=first.name))
            _insert(connection, first, now, token, None)
        return token

    @repeating
    def register(
        self, actor: str, new: Operator, valid_ms: int | None, reason: str, *, with_token: bool = True
    ) -> tuple[Operator, str]:
        known = self._as_it_is(new)
        if known is not None:
            return known, ""
        token = new_key()
        if not with_token:
            valid_ms = 0  # there has to be one: of this one, the text is never shown and the time is over
        with self._change(actor, "register operator", new.name, reason, _granted(new)) as (connection, now):
            if _find(connection, new.name) is not None:
                raise NameTaken
            _demand_free(connection, new)
            _insert(connection, new, now, token, valid_ms)
            return _read(connection, new.name), token if with_token else ""

    def _as_it_is(self, new: Operator) -> Operator | None:
        """Return the operator that is there; None if there is none. Raises NameTaken: with other rights."""
        with self._database.reading() as connection:
            row = _find(connection, new.name)
        if row is None:
            return None
        if differences(row._mapping, _rights(new)):
            raise NameTaken
        return _operator(row)

    @repeating
    def update(
        self, actor: str, wanted: Operator, fields: Collection[str], reason: str, *, end_tokens: bool = False
    ) -> Operator:
        changed: list[str] = []
        with self._change(actor, "update operator", wanted.name, reason, changed) as (connection, now):
            row = _find(connection, wanted.name)
            if row is None:
                raise OperatorUnknown
            values = {name: value for name, value in _rights(wanted).items() if name in fields}
            changed += differences(row._mapping, values)
            if end_tokens:
                values |= {"expires_ms": now, "old_token_hash": None, "old_expires_ms": None}
                changed.append("tokens: ended")
            if values:
                connection.execute(operator.update().filter_by(name=wanted.name).values(values))
            if "identities" in fields:
                _demand_free(connection, wanted)
            _keep_an_administrator(connection)
            return _read(connection, wanted.name)

    @repeating
    def rotate_token(
        self, actor: str, name: str, valid_ms: int | None, overlap_ms: int, reason: str
    ) -> tuple[Operator, str]:
        token = new_key()
        with self._change(actor, "rotate operator token", name, reason) as (connection, now):
            row = _find(connection, name)
            if row is None:
                raise OperatorUnknown
            ends = [now + overlap_ms, *([row.expires_ms] if row.expires_ms is not None else [])]
            values: dict[str, Any] = {"token_hash": hash_of(token), "expires_ms": _end(now, valid_ms)}
            kept = (row.token_hash, min(ends)) if overlap_ms else (None, None)
            values["old_token_hash"], values["old_expires_ms"] = kept
            connection.execute(operator.update().filter_by(name=name).values(values))
            _keep_an_administrator(connection)
            return _read(connection, name), token

    @repeating
    def remove(self, actor: str, name: str, reason: str) -> None:
        with self._change(actor, "remove operator", name, reason) as (connection, _):
            if _find(connection, name) is None:
                raise OperatorUnknown
            connection.execute(operator.delete().filter_by(name=name))
            _keep_an_administrator(connection)

    def operators(self) -> list[Operator]:
        with self._database.reading() as connection:
            return [known for _, known in _readable(connection)]


def known_operators(connection: sa.Connection) -> KnownOperators:
    """Return all operators, with their tokens, those that have expired too."""
    tokens: dict[bytes, Token] = {}
    identities: dict[str, Operator] = {}
    for row, known in _readable(connection):
        tokens[row.token_hash] = Token(operator=known, expires_ms=row.expires_ms)
        if row.old_token_hash is not None:
            replaced = replace(known, by_replaced_token=True)
            tokens[row.old_token_hash] = Token(operator=replaced, expires_ms=row.old_expires_ms)
        identities |= dict.fromkeys(known.identities, known)
    return KnownOperators(tokens=tokens, identities=identities)


def _demand_free(connection: sa.Connection, wanted: Operator) -> None:
    """Demand that no other operator has one of these identities. Raises NameTaken."""
    for row, known in _readable(connection):
        for each in set(wanted.identities) & set(known.identities) if row.name != wanted.name else ():
            raise NameTaken(f"{each} identifies {row.name}: an identity belongs to one operator.")


def _keep_an_administrator(connection: sa.Connection) -> None:
    """Raises InvalidField: no administrator would be left to register an operator."""
    lasting = operator.select().filter_by(role=int(Role.ADMIN), topics="[]", expires_ms=None)
    if connection.execute(lasting).first() is None:
        raise InvalidField(
            "name",
            "not be the last administrator of all topics whose token does not expire: register another one first",
        )


def _insert(connection: sa.Connection, new: Operator, now: int, token: str, valid_ms: int | None) -> None:
    values = {"name": new.name, "token_hash": hash_of(token), "created_ms": now, "expires_ms": _end(now, valid_ms)}
    connection.execute(operator.insert().values({**values, **_rights(new)}))


def _end(now: int, valid_ms: int | None) -> int | None:
    return None if valid_ms is None else now + valid_ms


def _rights(of: Operator) -> Mapping[str, Any]:
    """Return the rights by column."""
    return {
        "role": int(of.role),
        "topics": json.dumps(of.topics),
        "reads_bodies": int(of.reads_bodies),
        "identities": json.dumps(of.identities, ensure_ascii=False),
    }


def _granted(new: Operator) -> list[str]:
    return [f"{name}: {value}" for name, value in _rights(new).items()]


def _find(connection: sa.Connection, name: str) -> Any:
    """Find an operator's row; None if there is none."""
    return connection.execute(sa.select(operator).filter_by(name=name)).one_or_none()


def _read(connection: sa.Connection, name: str) -> Operator:
    return _operator(_find(connection, name))


def _readable(connection: sa.Connection) -> Iterator[tuple[Any, Operator]]:
    """Rows with what they say, by name. One that cannot be read keeps nobody else out."""
    for row in connection.execute(sa.select(operator).order_by(operator.c.name)):
        try:
            yield row, _operator(row)
        except (ValueError, TypeError) as exc:
            log.error("operator_row_unreadable", "operator %s is refused, the row cannot be read: %s", row.name, exc)


def _operator(row: Any) -> Operator:
    return Operator(
        name=row.name,
        role=Role(row.role),
        topics=tuple(json.loads(row.topics)),
        reads_bodies=bool(row.reads_bodies),
        identities=tuple(json.loads(row.identities)),
        expires_ms=row.expires_ms,
        previous_expires_ms=row.old_expires_ms,
        created_ms=row.created_ms,
    )
