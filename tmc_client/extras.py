"""Parts of the SDK with dependencies of their own: what is missing is named, with the extra that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tmc_client import errors
from tmc_common.extras import extra_of


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Translate a missing extra around imports. what: how the caller names it, for the message. Raises MissingExtra."""
    try:
        yield
    except ModuleNotFoundError as exc:
        extra = extra_of(exc)
        if extra is None:
            raise
        raise errors.MissingExtra(f"{what} needs {exc.name}, which is not installed: pip install '{extra}'.") from exc
