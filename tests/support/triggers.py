"""Test-only triggers that copy every change of a state into a log, whoever makes it."""

from __future__ import annotations

import sqlalchemy as sa

from tests.support.store import StoreUnderTest
from tmc_server.domain import consumption, message
from tmc_server.store.tables import shard_tables

_MESSAGE = "INSERT INTO test_log VALUES ('message', NEW.id, OLD.state, NEW.state, 0, 0)"
_CONSUMPTION = (
    "INSERT INTO test_log VALUES ('consumption', NEW.message_id, OLD.state, NEW.state, OLD.attempt, NEW.attempt)"
)


def watch(store: StoreUnderTest) -> None:
    """Log all updates of the test topic's shard from now on."""
    tables = shard_tables(store.shard)
    with store.database.transaction() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE IF NOT EXISTS test_log (kind VARCHAR(16), id BIGINT, was INT, is_now INT, from_try INT, to_try INT)"
        )
        for table, body in ((tables.message, _MESSAGE), (tables.consumption, _CONSUMPTION)):
            for statement in _trigger(store.database.url.get_backend_name(), table.name, body):
                connection.exec_driver_sql(statement)
        connection.exec_driver_sql("DELETE FROM test_log")


def _trigger(kind: str, table: str, body: str) -> list[str]:
    made = f"TRIGGER IF NOT EXISTS test_{table} AFTER UPDATE ON {table} FOR EACH ROW"
    match kind:
        case "sqlite":
            return [f"CREATE {made} BEGIN {body}; END"]
        case "postgresql":
            function = f"BEGIN {body}; RETURN NEW; END"
            made = made.replace("IF NOT EXISTS ", "")
            return [
                f"CREATE OR REPLACE FUNCTION test_{table}() RETURNS trigger LANGUAGE plpgsql AS $$ {function} $$",
                f"CREATE OR REPLACE {made} EXECUTE FUNCTION test_{table}()",
            ]
    return [f"CREATE {made} {body}"]


def forget(store: StoreUnderTest) -> None:
    """Take the triggers away."""
    with store.database.transaction() as connection:
        for table in shard_tables(store.shard).all[:2]:
            on = f" ON {table.name}" if store.database.url.get_backend_name() == "postgresql" else ""
            connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS test_{table.name}{on}")


def changes(store: StoreUnderTest, number: int) -> list[sa.Row]:
    with store.database.reading() as connection:
        return list(connection.execute(sa.text("SELECT * FROM test_log WHERE id = :id"), {"id": number}))


def check_invariants(store: StoreUnderTest, number: int) -> None:
    """I3: decided once. I4: only listed edges. I5: acks are final, try numbers never go back."""
    message_edges = {
        (a.value, transition.to.value) for (a, _), transition in message.TRANSITIONS.items() if a is not None
    }
    duty_edges = {
        (a.value, transition.to.value) for (a, _), transition in consumption.TRANSITIONS.items() if a is not None
    }
    log = changes(store, number)
    decisions = [c for c in log if c.kind == "message" and c.was != c.is_now]
    assert len(decisions) <= 1, log
    for change in log:
        if change.kind == "message" and change.was == change.is_now:
            continue  # who decided it was noted
        edges = message_edges if change.kind == "message" else duty_edges
        assert (change.was, change.is_now) in edges, change
        assert change.to_try >= change.from_try, change
        if change.kind == "consumption":
            assert change.was != consumption.ConsumptionState.ACKED, change
