"""A producer without a center and a target without a broker, for blocks and outboxes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

import tmc_client as tmc
from tmc_client.checks.fence import LedgerAnswers
from tmc_client.local.engines import engine_of
from tmc_client.outbox.entries import Entry, Failure
from tmc_client.tables import ledger_info
from tmc_common.protocol import message_pb2

_numbers = itertools.count(1)


@dataclass
class FakeProducer:
    """Prepares everything, remembers what was submitted and rolled back."""

    prepared: dict[str, str] = field(default_factory=dict)
    submitted: list[str] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    before_prepared: Callable[[str], None] = lambda _id: None

    def prepare(self, request: message_pb2.PrepareRequest, _timeout: timedelta) -> Future[Any]:
        message_id = f"1-1-06-{next(_numbers):012d}"
        self.before_prepared(message_id)
        self.prepared[message_id] = request.key
        return done(message_pb2.PrepareResult(message_id=message_id))

    def submit(self, message: Any, _timeout: timedelta) -> Future[Any]:
        self.submitted.append(message.key)
        return done(message_pb2.SubmitResult(message_id=message.message_id))

    def rollback(self, message: Any, _timeout: timedelta) -> Future[Any]:
        self.abandoned.append(message.key)
        return done(message_pb2.RollbackResult())


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


@dataclass
class FakeTarget:
    delays: bool = True
    taken: list[Entry] = field(default_factory=list)

    def send(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        self.taken.extend(entries)
        return [None] * len(entries)

    def close(self) -> None:
        pass


def verdicts(connect: Any, producer: FakeProducer) -> dict[str, tmc.Verdict]:
    """What a check says about each message that was prepared. connect: to the database with the ledger."""
    engine = engine_of(connect, "a test")
    with engine.connect() as connection:
        ledger_id = connection.execute(sa.select(ledger_info.c.ledger_id)).scalar()
    if ledger_id is None:
        return {}
    answers = LedgerAnswers(engine)
    asked = [
        tmc.Question(message_id=id_, topic="t", key=key, ledger_id=ledger_id, created_ms=1)
        for id_, key in producer.prepared.items()
    ]
    found = answers.answer(asked, fences=True)
    answers.close()
    return {question.key: answer.verdict for question, answer in zip(asked, found, strict=True)}
