"""How a server's process uses memory: set once, before it has threads."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
_ARENAS = 2


def keep_memory_small() -> None:
    """Keep the memory of the whole process small.

    Modules and tables live for ever, so no collection needs to look at them again. Requests are freed by their reference
    counts; the default looks for cycles all the time. glibc gives each thread an arena of its own and hands little of it
    back: gRPC's threads kept 80 MB more after a flood of unfinished requests.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    with suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(_ARENA_MAX, _ARENAS)
