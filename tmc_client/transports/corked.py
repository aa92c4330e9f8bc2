"""What pika's connections lack: frames that leave together, one system call for many where the library makes three per message;
and an end that does not wait for the other side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pika.adapters.select_connection import SelectConnection


def hang_up(connection: Any) -> None:
    """End a connection whose other side does not take part any more; its callbacks are told as of any lost one."""
    if not connection.is_closed:
        connection._adapter_disconnect_stream()


class CorkedConnection(SelectConnection):  # type: ignore[misc]  # the library has no types
    """Use it on its own thread only, as every pika connection."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self._held: list[bytes] | None = None
        super().__init__(*args, **keywords)

    @contextmanager
    def corked(self) -> Iterator[None]:
        """What is sent inside leaves at the end, in order."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            if held and self.is_open:
                self._adapter_emit_data(b"".join(held))

    def _adapter_emit_data(self, data: bytes) -> None:
        """The adapter's own way out, see pika.adapters.base_connection."""
        if self._held is None:
            super()._adapter_emit_data(data)
        else:
            self._held.append(data)
