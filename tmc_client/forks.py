"""Forked processes: threads and sockets of the parent are of no use to a child, which starts with new ones.

Python's fork hooks run for forks that it makes itself. Servers in C, such as uWSGI, bypass them, so whoever is about to use a
thread compares process ids first.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Protocol

_ALIVE: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_LOCK = threading.Lock()
_LONGEST_WAIT_S = 1.0  # the lock may have been held at the fork
_process = os.getpid()


class ForkAware(Protocol):
    """Something with threads or sockets that a forked child must not use."""

    def after_fork(self) -> None:
        """Drop all state in the child, and start again on the next use."""


def watch_forks(owner: ForkAware) -> None:
    """Call `owner.after_fork()` in every forked child."""
    _ALIVE.add(owner)


def abandon(*inherited: object) -> None:
    """Keep, in a forked child, the parent's objects unused; closing or freeing them could disturb the parent.

    They are not freed at the end of the child either, where librdkafka would wait for threads that it does not have.
    """
    for each in inherited:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def notice_fork() -> None:
    """Call it before you use a thread or a socket."""
    if os.getpid() == _process:
        return
    held = _LOCK.acquire(timeout=_LONGEST_WAIT_S)
    try:
        if os.getpid() != _process:
            _in_child()
    finally:
        if held:
            _LOCK.release()


def _in_child() -> None:
    global _process
    for owner in list(_ALIVE):
        owner.after_fork()
    _process = os.getpid()


os.register_at_fork(after_in_child=_in_child)
