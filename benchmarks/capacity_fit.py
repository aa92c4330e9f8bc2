"""The kinds of messages that `bench capacity` measures, and the lines that it fits to their costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tmc_cli.size import Load

MANY = 10


@dataclass(frozen=True, order=True)
class Shape:
    """A kind of message, the shards that its topic is in, and how many databases share the 32 shards."""

    subscribers: int
    body_bytes: int
    shards: int = 1
    databases: int = 1

    @property
    def load(self) -> Load:
        return Load(messages_per_s=1, subscribers=self.subscribers, body_bytes=self.body_bytes, shards=self.shards)

    @property
    def topic(self) -> str:
        return f"bench.{self.subscribers}.{self.shards}"

    @property
    def share(self) -> float:
        """The share of a round's messages that is sent: large ones take longer."""
        return 1 / (1 + (self.subscribers - 1) / 3 + self.body_bytes / 16384)


FITTED = [Shape(1, 256), Shape(1, 4096), Shape(1, 16384), Shape(4, 256), Shape(4, 4096), Shape(MANY, 256)]
FITTED += [Shape(MANY, 8192), Shape(1, 256, 8), Shape(1, 256, 32), Shape(4, 4096, 32), Shape(MANY, 256, 8)]
KEPT_BACK = [Shape(2, 1024), Shape(6, 512, 4), Shape(3, 8192, 16), Shape(2, 1024, 8, 2), Shape(2, 1024, 32, 4)]


def fitted(shapes: Sequence[Shape], measured: Sequence[float]) -> list[float]:
    """The coefficients of `Load.terms`, none below 0, with the smallest squares of relative errors."""
    rows = np.array([shape.load.terms for shape in shapes]) / np.array(measured)[:, None]
    terms, best = rows.shape[1], (math.inf, [0.0])
    for count in range(1, terms + 1):
        for used in itertools.combinations(range(terms), count):
            found = np.linalg.lstsq(rows[:, used], np.ones(len(measured)), rcond=None)[0]
            if (found < 0).any():
                continue
            squares = float(((rows[:, used] @ found - 1) ** 2).sum())
            coefficients = dict(zip(used, map(float, found), strict=True))
            best = min(best, (squares, [coefficients.get(index, 0.0) for index in range(terms)]))
    return [round(coefficient, 3) for coefficient in best[1]]
