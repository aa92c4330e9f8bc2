"""`tmc outbox`, as an operator of a service uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TMC = str(Path(sys.executable).parent / "tmc")
_SHOP = """
import sqlalchemy as sa
import tmc_client as tmc
from sqlalchemy.orm import Session
from tmc_client.outbox.entries import Failure, Trouble
from tmc_client.outbox.relay import Limits

class Target:
    delays = True
    def send(self, entries):
        says = {"bad": Failure(trouble=Trouble.REFUSED, error="no such topic\\x1b[31m")}
        return [says.get(entry.key) for entry in entries]
    def close(self): pass

engine = sa.create_engine("sqlite:///shop.db")
outbox = tmc.Outbox(engine, Target(), direct=False, limits=Limits(max_tries=1), untouched=__import__("datetime").timedelta(0))
away = tmc.Outbox(sa.create_engine("sqlite:////nowhere/at/all.db"), Target(), direct=False)
if __name__ == "__main__":
    tmc.create_tables(engine)
    with Session(engine) as session:
        for key in ("good", "bad"):
            outbox.add(session, "shop.paid", {}, key=key)
        session.commit()
    outbox.relay().run_once()
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "shop.py").write_text(_SHOP)
    subprocess.run([sys.executable, "shop.py"], cwd=tmp_path, check=True, stderr=subprocess.DEVNULL)

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        name, *rest = arguments
        words = [TMC, "outbox", name, *rest]
        return subprocess.run(words, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)

    return command


def test_from_the_status_to_the_repair(run: Run) -> None:
    standing = json.loads(run("status", "shop:outbox").stdout)
    assert (standing["sent"], standing["failed"], standing["unsent"], standing["failed_share"]) == (1, 1, 0, 0.5)
    assert "good: added" in (shown := run("show", "shop:outbox", "good").stdout)
    assert "sent by a relay at" in shown
    failed = run("failed", "shop:outbox").stdout
    number = failed.split()[0]
    assert "FAILED  shop.paid bad: added" in failed
    assert "refused 1 times: no such topic\\u001b[31m" in failed
    partly = run("retry", "shop:outbox", number, "999")
    assert (partly.stderr.strip(), partly.returncode) == ("1 of 2 are tried again.", 1)
    assert json.loads(run("status", "shop:outbox").stdout)["unsent"] == 1
    missing = run("discard", "shop:outbox", number)
    assert (missing.stderr.strip(), missing.returncode) == ("0 of 1 are deleted.", 1)
    none = run("retry", "shop:outbox", "--all")
    assert (none.stderr.strip(), none.returncode) == ("0 are tried again.", 0)
    assert run("clean", "shop:outbox", "--older-than", "1h").stderr.strip() == "0 are deleted."


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("show", "shop:outbox", "none"), 1, "There is no message with key 'none' in this outbox."),
        (("retry", "shop:outbox"), 2, "Give the ids that `tmc outbox failed` prints, or --all."),
        (("status", "shop"), 2, "names no outbox: give MODULE:NAME, for example shop.messages:outbox"),
        (("status", "shop:engine"), 2, "is no tmc_client.Outbox"),
        (("status", "nothing:outbox"), 2, "there is no module 'nothing'"),
        (("status", "shop:away"), 1, "The database of this outbox does not answer: unable to open database file"),
        (("clean", "shop:outbox", "--older-than", "soon"), 2, "'soon' is no time such as 12h or 30d"),
    ],
)
def test_mistakes_get_one_sentence(run: Run, arguments: tuple[str, ...], code: int, sentence: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
