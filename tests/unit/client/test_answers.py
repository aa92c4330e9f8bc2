"""A check is answered by the ledger that its message was prepared with, or by the function of its topic."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tmc_client.checks.answers import Checks
from tmc_client.producing.ledger import create_tables, ledger_id_of


def _checks(engine: sa.Engine | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Checks, tmc.Center]:
    center = tmc.connect("127.0.0.1:1", app="orders")
    center.check("shop.paid")(lambda _: tmc.Verdict.COMMIT)
    checks = center.checks(engine) if engine is not None else center.checks()
    monkeypatch.setattr(checks.token, "is_right", lambda _: True)
    return checks, center


def _verdict(checks: Checks, ledger_id: bytes) -> tmc.Verdict:
    question = tmc.Question(
        message_id="1-1-05-1", topic="shop.paid", key="k", attempt_id=b"a" * 16, ledger_id=ledger_id
    )
    return checks.answer("token", [question])[0].verdict


def test_a_topic_with_a_function_has_its_ledger_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    with engine.begin() as connection:
        ledger_id = ledger_id_of(connection.execute)
    checks, center = _checks(engine, monkeypatch)
    assert _verdict(checks, ledger_id) is tmc.Verdict.ROLLBACK  # fenced: no block can commit it any more
    assert _verdict(checks, b"") is tmc.Verdict.COMMIT
    center.close()
    engine.dispose()


def test_without_a_ledger_the_function_answers_for_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, center = _checks(None, monkeypatch)
    assert _verdict(checks, b"some ledger") is tmc.Verdict.COMMIT
    center.close()
