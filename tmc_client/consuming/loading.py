"""Find an object of the user's program by MODULE:NAME."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def load(reference: str, kind: type[T], example: str) -> T:
    """The object that MODULE:NAME means; the current directory is searched first. Raises ValueError."""
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise ValueError(f"{reference!r} names no {kind.__name__.lower()}: give MODULE:NAME, for example {example}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        raise ValueError(f"{reference!r}: there is no module {exc.name!r} to import from here") from exc
    if not hasattr(module, name):
        raise ValueError(f"{reference!r}: there is no {name} in {module_name}")
    found = getattr(module, name)
    if not isinstance(found, kind):
        raise ValueError(f"{reference!r} is no tmc_client.{kind.__name__} but {found!r}")
    return found
