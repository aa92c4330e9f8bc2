"""Optional dependencies, by the extra that installs them."""

from __future__ import annotations

_EXTRAS = {
    "MySQLdb": "mysql",
    "pika": "rabbitmq",
    "consul": "consul",
    "requests": "consul",
    "confluent_kafka": "kafka",
    "sqlalchemy": "outbox",
    "pyspark": "pipeline",
}


def extra_of(exc: ModuleNotFoundError) -> str | None:
    """None: what is missing comes with no extra."""
    return _EXTRAS.get((exc.name or "").partition(".")[0])
