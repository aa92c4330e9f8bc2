"""The pytest plugin: the fixture `tmc_center`.

A package of its own: pytest imports it in every run, and the SDK takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tmc_client.testing.center import ManualCenter


@pytest.fixture
def tmc_center() -> Iterator[ManualCenter]:
    """A center with nothing in it, for one test. See tmc_client.testing."""
    from tmc_client.testing.center import ManualCenter

    with ManualCenter() as center:
        yield center
