"""How much of a test is run: the full doses by `./scripts/test --long`."""

from __future__ import annotations

import os

LONG = bool(os.environ.get("TMC_TEST_LONG"))
