"""The storm itself: strikes a world by a plan."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from tmc_storm.plan import Fault, Strike

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A strike as it was. began_s, ended_s: from the beginning of the storm; between them, something was broken."""

    strike: Strike
    began_s: float
    ended_s: float


@dataclass(frozen=True, kw_only=True)
class Missed:
    """A strike that could not be made: what it would have broken was broken already, or is slow. why: what was raised."""

    strike: Strike
    why: Exception


class StormBroken(Exception):
    """A fault could not be mended, so the run says nothing about the center."""


class Weather:
    """Runs a plan. Each part has a thread of its own, so that a slow one delays only its own strikes."""

    def __init__(self, faults: Sequence[Fault], strikes: Sequence[Strike], seed: int) -> None:
        self._faults = {(fault.kind, fault.part): fault for fault in faults}
        self._by_part: defaultdict[str, list[Strike]] = defaultdict(list)
        for strike in strikes:
            self._by_part[strike.part].append(strike)
        self._seed = seed
        self._lock = threading.Lock()
        self._struck: list[Struck] = []
        self.missed: list[Missed] = []
        self._broken: list[str] = []
        self._over = threading.Event()

    def rage(self, seconds: float) -> list[Struck]:
        """Strike until the time is over; everything is mended when it returns. Raises StormBroken."""
        began = time.monotonic()
        threads = [
            threading.Thread(target=self._strike_all, args=(strikes, began, began + seconds), name=part)
            for part, strikes in self._by_part.items()
        ]
        for thread in threads:
            thread.start()
        try:
            self._over.wait(seconds)
        finally:
            self._over.set()  # also if this is interrupted
            for thread in threads:
                thread.join()
        if self._broken:
            raise StormBroken("; ".join(self._broken))
        return sorted(self._struck, key=lambda struck: struck.began_s)

    def _strike_all(self, strikes: Sequence[Strike], began: float, until: float) -> None:
        for strike in strikes:
            wait_s = began + strike.at_s - time.monotonic()
            if self._over.wait(max(wait_s, 0.0)) or time.monotonic() >= until:
                return
            begun_s = time.monotonic() - began
            try:
                end = self._faults[strike.kind, strike.part].begin(random.Random(f"{self._seed} {strike.number}"))
            except Exception as exc:
                log.debug("%s at %s", strike.kind, strike.part, exc_info=True)
                with self._lock:
                    self.missed.append(Missed(strike=strike, why=exc))
                continue
            try:
                self._over.wait(strike.lasts_s)
                end()
            except grpc.RpcError as exc:
                self.missed.append(Missed(strike=strike, why=exc))
            except Exception as exc:
                log.debug("%s at %s", strike.kind, strike.part, exc_info=True)
                self._broken.append(f"{strike.kind} at {strike.part}: {exc!r}")
                self._over.set()
                return
            with self._lock:
                self._struck.append(Struck(strike=strike, began_s=begun_s, ended_s=time.monotonic() - began))
