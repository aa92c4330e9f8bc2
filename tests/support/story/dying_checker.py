"""`tmc serve`, killed by itself at one point of a check of a message whose key begins with `die-`.

usage: TMC_DIE_AT=POINT dying_checker.py serve; points: before-claim, after-claim, after-answer, before-commit, after-commit
"""

from __future__ import annotations

import os
import signal

from tmc_server.checks.asking import CheckDispatcher
from tmc_server.store import due_checks
from tmc_server.store.due_checks import SqlDueChecks

POINT = os.environ["TMC_DIE_AT"]


def die_at(point, keys):
    if point == POINT and any(key.startswith("die-") for key in keys):
        os.kill(os.getpid(), signal.SIGKILL)


claim, ask, record, stored = SqlDueChecks.claim, CheckDispatcher.ask, due_checks.record, SqlDueChecks.record


def dying_claim(self, shard, pending, until_ms):
    keys = [each.key for each in pending]
    die_at("before-claim", keys)
    claimed = claim(self, shard, pending, until_ms)
    die_at("after-claim", keys)
    return claimed


def dying_ask(self, target, app, tag, questions, seconds):
    answers = ask(self, target, app, tag, questions, seconds)
    die_at("after-answer", [question.key for question in questions])
    return answers


def dying_record(tx, answers, tell_overdue):
    recorded = record(tx, answers, tell_overdue)
    die_at("before-commit", [checked.pending.key for checked in answers])
    return recorded


def dying_stored(self, shard, answers, tell_overdue):
    recorded = stored(self, shard, answers, tell_overdue)
    die_at("after-commit", [checked.pending.key for checked in answers])
    return recorded


SqlDueChecks.claim, CheckDispatcher.ask, due_checks.record, SqlDueChecks.record = (
    dying_claim,
    dying_ask,
    dying_record,
    dying_stored,
)

if __name__ == "__main__":
    from tmc_cli import main

    main()
