"""A pytest plugin: writes the node ids of tests whose own call failed into the file that TMC_MUTANT_RESULTS names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.failed:
        with Path(os.environ["TMC_MUTANT_RESULTS"]).open("a") as results:
            results.write(report.nodeid + "\n")
