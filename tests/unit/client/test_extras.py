"""What is not installed is named at the first use of what needs it, with the extra that brings it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_USES = {
    "tmc.Outbox": ("sqlalchemy", "outbox", "tmc.Outbox"),
    "tmc.SqlInbox": ("sqlalchemy", "outbox", "tmc.SqlInbox"),
    "tmc.create_tables": ("sqlalchemy", "outbox", "tmc.create_tables"),
    "center.transaction()": ("sqlalchemy", "outbox", "center.transaction(None)"),
    "center.checks(engine)": ("sqlalchemy", "outbox", "center.checks(None)"),
    "center.resume()": ("sqlalchemy", "outbox", "center.resume(None)"),
    "aio.create_tables()": ("sqlalchemy", "outbox", "asyncio.run(aio.create_tables(None))"),
    "tmc.RabbitTarget": ("pika", "rabbitmq", "tmc.RabbitTarget"),
    "The target of amqp://": ("pika", "rabbitmq", "tmc.Outbox(sa.create_engine('sqlite://'), 'amqp://127.0.0.1:1')"),
    "The target of kafka://": (
        "confluent_kafka",
        "kafka",
        "tmc.Outbox(sa.create_engine('sqlite://'), 'kafka://127.0.0.1:1')",
    ),
    "consul://": ("consul", "consul", "tmc.connect('consul://127.0.0.1:1/tmc', app='orders')"),
    "checks.serve(agent=...)": ("consul", "consul", "center.checks().serve(agent='127.0.0.1:1', service='orders')"),
}


def _run(missing: str, use: str) -> str:
    """The last line of what it prints."""
    script = f"""
        import asyncio, sys
        sys.modules[{missing!r}] = None
        import tmc_client as tmc
        if {missing!r} != "sqlalchemy":
            import sqlalchemy as sa
        from tmc_client import aio
        center = tmc.connect("127.0.0.1:1", app="orders")
        try:
            {use}
        except tmc.InvalidRequest as exc:
            print(type(exc).__name__, exc)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=60
    )
    return (done.stdout or done.stderr).strip().rpartition("\n")[2]


@pytest.mark.parametrize("what", _USES)
def test_a_missing_extra_is_named(what: str) -> None:
    missing, extra, use = _USES[what]
    said = _run(missing, use)
    assert said == f"MissingExtra {what} needs {missing}, which is not installed: pip install 'tmc-client[{extra}]'."
