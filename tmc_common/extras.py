"""Optional dependencies, by the extra that installs them."""

from __future__ import annotations

_EXTRAS = {
    "MySQLdb": "mysql",
    "psycopg": "postgresql",
    "pika": "rabbitmq",
    "consul": "consul",
    "requests": "consul",
    "confluent_kafka": "kafka",
    "sqlalchemy": "outbox",
    "pyspark": "pipeline",
}


def extra_of(exc: ModuleNotFoundError) -> str | None:
    """Return the extra to install; None if what is missing comes with none."""
    return _EXTRAS.get((exc.name or "").partition(".")[0])
