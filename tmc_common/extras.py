"""Optional dependencies, by the distribution and extra that install them."""

from __future__ import annotations

_EXTRAS = {
    "MySQLdb": "tmc-center[mysql]",
    "psycopg": "tmc-center[postgresql]",
    "pika": "tmc-client[rabbitmq]",
    "consul": "tmc-client[consul]",
    "requests": "tmc-client[consul]",
    "confluent_kafka": "tmc-client[kafka]",
    "sqlalchemy": "tmc-client[outbox]",
    "joserfc": "tmc-center[oidc]",
    "pyspark": "tmc-center[pipeline]",
}


def extra_of(exc: ModuleNotFoundError) -> str | None:
    """Return what to install, for example "tmc-client[kafka]"; None if no extra brings what is missing."""
    return _EXTRAS.get((exc.name or "").partition(".")[0])
