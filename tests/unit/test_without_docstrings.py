"""Under `python -OO` there are no docstrings: whatever a program says to people stands elsewhere."""

from __future__ import annotations

import subprocess
import sys

_MUTE = """
import tmc_client.errors, tmc_server.errors

def kinds(kind):
    for each in kind.__subclasses__():
        yield each
        yield from kinds(each)

assert not tmc_server.errors.TmcError.__doc__
found = [each for each in kinds(tmc_server.errors.TmcError) if each is not tmc_server.errors.InvalidField]
print(len(found) > 40, [each.__name__ for each in found if not str(each())], tmc_client.errors.Fenced.text[:7])
"""


def test_errors_say_what_to_do() -> None:
    ran = subprocess.run([sys.executable, "-OO", "-c", _MUTE], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "True [] A check\n"


def test_a_command_shows_how_it_is_used() -> None:
    command = [sys.executable, "-OO", "-m", "tmc_client.consume"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stderr[:6]) == (1, "usage:")
