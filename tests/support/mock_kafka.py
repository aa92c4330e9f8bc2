"""The mock cluster inside librdkafka, with answers as one likes; the Python library can start it, but not tell it what to say."""

from __future__ import annotations

import ctypes
from pathlib import Path

import confluent_kafka

INIT_PRODUCER_ID = 22
"""The request by which an idempotent producer begins."""


class MockKafka:
    """One broker. Lives until it is closed."""

    def __init__(self) -> None:
        (library,) = (Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs").glob("librdkafka-*")
        self._library = ctypes.CDLL(str(library))
        for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
            getattr(self._library, name).restype = ctypes.c_void_p
        self._library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        why = ctypes.create_string_buffer(512)
        settings = ctypes.c_void_p(self._library.rd_kafka_conf_new())
        self._client = ctypes.c_void_p(self._library.rd_kafka_new(0, settings, why, ctypes.c_size_t(512)))
        self._cluster = ctypes.c_void_p(self._library.rd_kafka_mock_cluster_new(self._client, 1))
        self.bootstrap = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def refuse(self, request: int, error: int) -> None:
        """Answer the next request of this kind with an error, of confluent_kafka.KafkaError."""
        errors = (ctypes.c_int * 1)(error)
        push = self._library.rd_kafka_mock_push_request_errors_array
        push(self._cluster, ctypes.c_int16(request), ctypes.c_size_t(1), errors)

    def close(self) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)
