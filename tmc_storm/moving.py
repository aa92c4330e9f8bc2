"""A shard that moves from one database of the center to another, by a command that is killed on its way."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Sequence

import grpc

from tmc_common.protocol import admin_pb2
from tmc_storm.eventually import eventually
from tmc_storm.operator import Operator
from tmc_storm.plan import Ending, Fault

Run = Callable[[Sequence[str]], "subprocess.Popen[str]"]
"""Starts `tmc` with these arguments and the configuration of a server."""

_LONGEST_S = 8.0
_COMMAND_S = 90.0
_OVER_S = 240.0  # while other things are broken, the command may have to be repeated often
_MOVED_ALREADY = "finish that with --to"


def shard_moves(operator: Operator, run: Run) -> list[Fault]:
    """Return the faults of moving a shard: the move is killed, and finished, or undone."""

    def fault(what: str, *, is_undone: bool) -> Fault:
        return Fault(
            kind=f"operator: {what}",
            part="operator of shards",
            begin=lambda dice: _begun(operator, run, dice, is_undone=is_undone),
            longest_s=_LONGEST_S,
            weight=0.15,
        )

    return [fault("shard moved", is_undone=False), fault("shard move undone", is_undone=True)]


def _begun(operator: Operator, run: Run, dice: random.Random, *, is_undone: bool) -> Ending:
    places = operator.call("GetShardMap").shards
    shard = _busy_shard(operator, dice)
    source = places[shard].database
    target = dice.choice(sorted({place.database for place in places} - {source}))
    command = run(["move-shard", str(shard), "--to", target])

    def end() -> None:
        command.kill()  # unless it is done
        command.communicate()
        move = _Move(operator, run, shard=shard, target=target, is_undone=is_undone)
        eventually(move.is_over, seconds=_OVER_S, describe=lambda: move.said)

    return end


def _busy_shard(operator: Operator, dice: random.Random) -> int:
    """Return a shard with new messages."""
    listed = operator.call("ListMessages", newest_first=True, page_size=100).messages
    return dice.choice(sorted({int(message.message_id.split("-")[2]) for message in listed} or {0}))


class _Move:
    """A move that was cut short, and is brought to its end. said: the last answer of the command."""

    def __init__(self, operator: Operator, run: Run, *, shard: int, target: str, is_undone: bool) -> None:
        self._operator = operator
        self._run = run
        self._shard = shard
        self._target = target
        self._is_undone = is_undone
        self._is_tried = False
        self.said = ""

    def is_over(self) -> bool:
        """Do the next step. Returns: whether the shard is in one place, and not on its way."""
        try:
            place = self._operator.call("GetShardMap").shards[self._shard]
        except grpc.RpcError:  # much else may be broken
            return False
        if not place.HasField("move"):
            if self._is_tried and (self._is_undone or place.database == self._target):
                return True
            # It was killed before it began, or what it began is not visible yet.
            self._do(*(("--undo",) if self._is_undone else ("--to", self._target)))
        elif place.move.step == admin_pb2.MOVE_STEP_MOVED:
            self._do("--confirm")
        elif self._is_undone:
            self._do("--undo")
            self._is_undone = _MOVED_ALREADY not in self.said
        else:
            self._do("--to", self._target)
        return False

    def _do(self, *arguments: str) -> None:
        self._is_tried = True
        command = self._run(["move-shard", str(self._shard), *arguments])
        try:
            self.said = " ".join(command.communicate(timeout=_COMMAND_S))
        except subprocess.TimeoutExpired:
            command.kill()
            command.communicate()
