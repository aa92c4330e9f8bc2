"""A storm that cannot find a planted bug proves nothing: bugs are planted one at a time, and `tmc storm` has to notice.

Some are mutants of docs/mutants.md, others what a careless change would do. All by `--long`, for two minutes each; in CI,
one that is found fast.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutants.run import NOT_COPIED, ROOT, Edit, mutants
from tests.support.dose import LONG

pytestmark = [pytest.mark.mariadb, pytest.mark.postgresql, pytest.mark.services, pytest.mark.timeout(400)]

PLANTED = {
    "a delivery does not wait for its delay": Edit(
        "tmc_server/store/scheduling.py",
        "consumption.untried(tx.now + message.delay_ms)",
        "consumption.untried(tx.now)",
    ),
    "an inbox notes nothing": Edit("tmc_client/consuming/inbox.py", "self._local.insert(inbox, rows)", "pass"),
    "a handler that fails is acked": Edit("tmc_client/consuming/calling.py", "return nack(_text(exc))", "return ack"),
    "what is not in the ledger was committed": Edit(
        "tmc_client/checks/fence.py", 'return Answer(Verdict.ROLLBACK, "FENCED', 'return Answer(Verdict.COMMIT, "FENCED'
    ),
    "a relay sends nothing": Edit("tmc_client/outbox/relay.py", "moved = self._one_pass(now)", "moved = False"),
    "an ack changes nothing": Edit(
        "tmc_server/domain/consumption.py",
        "return None if transition is None else replace(row, state=transition.to, due_ms=None)",
        "return None",
    ),
    "a rollback commits": Edit(
        "tmc_server/store/messages.py",
        "    event = MessageEvent.SUBMIT if operation.commit else MessageEvent.ROLLBACK\n    outcome = decide(",
        "    event = MessageEvent.SUBMIT\n    outcome = decide(",
    ),
    "the first failure is the last": Edit(
        "tmc_server/domain/consumption.py",
        "exhausted = budget.is_used_up(row, policy, now + wait_ms, counts=counts)",
        "exhausted = True",
    ),
    "a body loses its last byte": Edit(
        "tmc_server/store/copies.py", "            body=row.body,", "            body=row.body[:-1],"
    ),
    "a message of an order key waits for nobody": Edit(
        "tmc_server/store/lines.py", "return line.last, line.head != number", "return line.last, False"
    ),
    "nobody is checked": Edit("tmc_server/store/due_checks.py", "return self._look.due()", "return []"),
    "a webhook that fails is acked": Edit("tmc_server/delivery/webhook.py", "if 200 <= status < 300:", "if status:"),
    "webhooks are signed with another key": Edit(
        "tmc_server/delivery/webhook.py",
        "for key in (keys.signing, keys.other) if key is not None]",
        "for key in [b'']]",
    ),
    "what failed is due again in an hour": Edit(
        "tmc_server/domain/consumption.py",
        "wait_ms = policy.delay_for_ms(row.tried, budget.number) if retry_after_ms is None else retry_after_ms",
        "wait_ms = 3_600_000",
    ),
}
FOUND_AS = {
    "a delivery does not wait for its delay": ("sqlite", {"early"}),
    "an ack changes nothing": ("sqlite", {"human work"}),
    "an inbox notes nothing": ("mariadb", {"doubled"}),
    "a handler that fails is acked": ("sqlite", {"lost"}),
    "what is not in the ledger was committed": ("mariadb", {"ghost"}),
    "a relay sends nothing": ("sqlite", {"lost"}),
    "a rollback commits": ("sqlite", {"ghost"}),
    "the first failure is the last": ("sqlite", {"human work"}),
    "a body loses its last byte": ("sqlite", {"human work"}),
    "a message of an order key waits for nobody": ("sqlite", {"human work"}),
    "nobody is checked": ("sqlite", {"unfinished"}),
    "what failed is due again in an hour": ("sqlite", {"unfinished"}),
    "a webhook that fails is acked": ("sqlite", {"lost"}),
    "webhooks are signed with another key": ("sqlite", {"human work"}),
    "14-ledger-fence": ("mariadb", {"lost"}),
    "31-fence": ("postgresql", {"lost"}),
    "406-inbox-down": ("mariadb", {"human work"}),
}
"""Each bug, over which store it shows, and as what."""


def _edits(bug: str) -> Sequence[Edit]:
    return [PLANTED[bug]] if bug in PLANTED else next(mutant.edits for mutant in mutants() if mutant.name == bug)


@pytest.mark.parametrize("bug", FOUND_AS if LONG else list(FOUND_AS)[:1])
def test_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    copy, report = tmp_path / "copy", tmp_path / "report"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    for edit in _edits(bug):
        edit.apply(copy)
    store, kinds = FOUND_AS[bug]
    minutes = "2" if LONG else "0.3"
    options = ["--minutes", minutes, "--seed", "1", "--store", store, "--report", str(report)]
    command = [sys.executable, "-m", "tmc_cli", "storm", *options]
    done = subprocess.run(command, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = json.loads((report / "report.json").read_text())["found"]
    assert all(found[kind] for kind in kinds), found


@pytest.mark.parametrize("bug", FOUND_AS)
def test_every_bug_can_be_planted(bug: str) -> None:
    for edit in _edits(bug):
        assert (ROOT / edit.file).read_text().count(edit.old) == 1
