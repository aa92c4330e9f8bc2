"""A shard's move that was killed is brought to its end, whatever the command had done until then."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tmc_common.protocol import admin_pb2
from tmc_storm.moving import shard_moves
from tmc_storm.operator import Operator

COPYING, MOVED = admin_pb2.MOVE_STEP_COPYING, admin_pb2.MOVE_STEP_MOVED


class Center:
    """Two databases, a shard in the first one, and `tmc move-shard` as far as it matters. refuses: how many calls fail."""

    def __init__(self, *, refuses: int = 0) -> None:
        self.place = admin_pb2.ShardPlace(shard=0, database="a")
        self.commands: list[str] = []
        self._refuses = refuses

    def call(self, rpc: str, **_fields: Any) -> Any:
        if rpc == "ListMessages":
            return SimpleNamespace(messages=[])
        return SimpleNamespace(shards=[self.place, admin_pb2.ShardPlace(shard=1, database="b")])

    def run(self, words: Sequence[str]) -> Any:
        self.commands.append(" ".join(words[2:]))
        said = ""
        if self._refuses:
            self._refuses -= 1
        elif words[2] == "--to":
            is_first = len(self.commands) == 1
            self.place.move.step = COPYING if is_first else MOVED
            self.place.database = "a" if is_first else "b"
        elif words[2] == "--undo" and self.place.move.step == MOVED:
            said = "Shard 0 is moved already: finish that with --to."
        else:
            self.place.ClearField("move")
        done = subprocess.Popen(["true"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return SimpleNamespace(kill=done.kill, communicate=lambda timeout=None: (said, done.communicate()[1]))


def _moved(center: Center, what: str) -> Center:
    (fault,) = [each for each in shard_moves(cast("Operator", center), center.run) if each.kind == what]
    end = fault.begin(random.Random(1))
    end()
    return center


def test_a_move_is_continued_and_confirmed() -> None:
    center = _moved(Center(), "operator: shard moved")
    assert center.commands == ["--to b", "--to b", "--confirm"]
    assert (center.place.database, center.place.HasField("move")) == ("b", False)


def test_one_that_was_killed_before_it_began_is_begun_again() -> None:
    center = _moved(Center(refuses=2), "operator: shard moved")
    assert center.commands == ["--to b", "--to b", "--to b", "--confirm"]


def test_a_move_is_undone() -> None:
    center = _moved(Center(), "operator: shard move undone")
    assert center.commands == ["--to b", "--undo"]
    assert (center.place.database, center.place.HasField("move")) == ("a", False)


def test_an_undo_that_comes_too_late_ends_as_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    center = Center()
    run = center.run

    def opened(words: Sequence[str]) -> Any:
        if words[2] != "--undo":
            return run(words)
        center.commands.append("--undo")  # the copies are open already, though the step does not say so
        return SimpleNamespace(communicate=lambda timeout=None: ("finish that with --to", ""))

    monkeypatch.setattr(center, "run", opened)
    assert _moved(center, "operator: shard move undone").commands == ["--to b", "--undo", "--to b", "--confirm"]
