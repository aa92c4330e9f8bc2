"""Handlers between a scripted transport and a scripted center."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import tmc_client as tmc
from tmc_client.connecting import sender
from tmc_client.consuming.handling import Handling
from tmc_client.consuming.listeners import Listeners
from tmc_client.consuming.turns import BatchSize


class HandClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class AnswersTaken:
    """Takes every answer; `stored` says how it ends."""

    def __init__(self) -> None:
        self.sender = self
        self.identity = SimpleNamespace(app="coupons")
        self.connection = SimpleNamespace(unary=lambda _path, _response: None)
        self.sent: list[tuple[str, Any]] = []
        self.open: list[Future[Any]] = []
        self.hold = False

    def send(self, kind: sender.Kind, request: Any, timeout: float) -> Future[Any]:
        future: Future[Any] = Future()
        self.sent.append((kind.path.rpartition("/")[2], request))
        if self.hold:
            self.open.append(future)
        else:
            future.set_result(None)
        return future

    def flush(self, timeout: float) -> bool:
        return True

    def answers(self) -> list[tuple[str, int]]:
        return [(name, request.attempt) for name, request in self.sent if name != "ExtendMany"]


class CountedReceipt:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.lost = False

    def handled(self) -> None:
        self.seen.append("handled")

    def answered(self) -> None:
        self.seen.append("answered")


class HandlerBench:
    """Handlers whose clock and copies are the test's."""

    def __init__(self, concurrency: int = 2, max_handling: timedelta = timedelta(hours=1)) -> None:
        self.center = AnswersTaken()
        self.clock = HandClock()
        self.broken = threading.Event()
        self.listeners = Listeners(max_handling)
        self.handling = Handling(
            self.center,  # type: ignore[arg-type]
            self.listeners,
            concurrency=concurrency,
            on_broken=self.broken.set,
            monotonic=self.clock,
        )

    def start(
        self,
        handler: Callable[..., Any],
        inbox: Any = None,
        max_handling: timedelta | None = None,
        batch: BatchSize | None = None,
    ) -> None:
        self.listeners.add(tmc.Topic("t"), handler, inbox, max_handling, batch)
        self.handling.start()

    def arrive(self, message: tmc.Message) -> CountedReceipt:
        receipt = CountedReceipt()
        self.handling.arrive(message, receipt)
        return receipt

    def stop(self) -> None:
        self.handling.begin_no_more()
        self.handling.wait_idle(0.001)
        self.handling.stop()
