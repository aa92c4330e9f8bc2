"""Built-in delivery: one Subscribe stream, kept open, with credit for what the handlers can take."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import grpc

from tmc_client import errors
from tmc_client.connecting import wire
from tmc_client.connecting.connection import Caller
from tmc_client.consuming.received import Message, OnMessage
from tmc_common.protocol import consumption_pb2

log = logging.getLogger("tmc_client.stream")

_PATH = "/tmc.v1.ConsumptionService/Subscribe"
_PAUSES_S = (0.05, 0.2, 0.5, 1.0, 2.0)


class _Receipt:
    __slots__ = ("_generation", "_transport")

    def __init__(self, transport: StreamTransport, generation: int) -> None:
        self._transport = transport
        self._generation = generation

    def handled(self) -> None:
        self._transport.handled(self._generation)

    def answered(self) -> None:
        """Nothing to do: the center that sent the copy stored the answer itself."""

    @property
    def lost(self) -> bool:
        """Never: the center gives it to nobody else while it is extended."""
        return False


def _message(delivery: consumption_pb2.Delivery) -> Message:
    return Message(
        id=delivery.message_id,
        topic=delivery.topic,
        key=delivery.key,
        body=delivery.body,
        content_type=delivery.content_type,
        headers=dict(delivery.headers),
        attempt=delivery.attempt,
        producer=delivery.producer,
        subscriber=delivery.subscriber,
        interval_ms=delivery.retry_interval_ms,
        redelivered=delivery.redelivered,
    )


class StreamTransport:
    """received.Transport over one stream. prefetch: its credit.

    A broken stream is reopened with full credit; its copies are redelivered, and handling the old ones gives the new
    stream no credit.
    """

    def __init__(
        self,
        connection: Caller,
        topics: Sequence[str],
        prefetch: int,
        on_message: OnMessage,
    ) -> None:
        self._connection = connection
        self._topics = topics
        self._prefetch = prefetch
        self._on_message = on_message
        self._complaint = ""
        self._reads = False
        self.malformed = 0  # the center itself makes what comes here
        self._condition = threading.Condition()
        self._credit = 0
        self._generation = 0
        self._stopping = threading.Event()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name="tmc-stream", daemon=True)

    @property
    def unread(self) -> Sequence[str]:
        """Return its topics, while the stream is broken."""
        return [] if self._reads else self._topics

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Nothing to do: every received copy was handed over."""

    def handled(self, generation: int) -> None:
        with self._condition:
            if generation == self._generation:
                self._credit += 1
                self._condition.notify_all()

    def stop(self) -> None:
        """Stop receiving; copies already received stay with the caller."""
        self._stopping.set()
        with self._condition:
            self._generation += 1
            self._condition.notify_all()
        if self._call is not None:
            self._call.cancel()
        if self._thread.is_alive():
            self._thread.join(10)

    def _requests(self, generation: int) -> Iterator[consumption_pb2.SubscribeRequest]:
        with self._condition:
            self._credit = 0
        yield consumption_pb2.SubscribeRequest(topics=self._topics, credit=self._prefetch)
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._credit or self._generation != generation)
                if self._generation != generation:
                    return
                credit, self._credit = self._credit, 0
            yield consumption_pb2.SubscribeRequest(credit=min(credit, self._prefetch))

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            with self._condition:
                self._generation += 1
                generation = self._generation
                self._condition.notify_all()
            received = 0
            try:
                self._reads = True  # until it turns out to be broken
                received = self._receive(generation)
            except grpc.RpcError as exc:
                error = wire.from_rpc(exc)
                if not self._stopping.is_set() and not error.retryable:
                    self._complain(error)
            except Exception:
                log.exception("the stream of this consumer failed and is opened again")
            self._reads = False
            failures = 0 if received else min(failures + 1, len(_PAUSES_S) - 1)
            self._stopping.wait(_PAUSES_S[failures])

    def _complain(self, error: errors.TmcError) -> None:
        """Log an error unless it repeats the last one: the stream is retried constantly."""
        hint = ""
        if error.reason == "SUBSCRIPTION_UNKNOWN":
            hint = f" Subscribe this app first: tmc admin subscribe TOPIC {self._connection.identity.app}"
        if str(error) != self._complaint:
            self._complaint = str(error)
            log.error("the center refuses this consumer, which keeps asking: %s%s", error, hint)

    def _receive(self, generation: int) -> int:
        """Read one stream to its end. Returns: how many copies came."""
        received = 0
        call = self._connection.stream(_PATH, consumption_pb2.SubscribeResponse, self._requests(generation))
        self._call = call
        if self._stopping.is_set():  # stop() may have missed this call
            call.cancel()
        try:
            for response in call:
                for delivery in response.deliveries:
                    received += 1
                    self._on_message(_message(delivery), _Receipt(self, generation))
        except grpc.RpcError:
            if not received:
                raise
        return received
