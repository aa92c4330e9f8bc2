"""Log lines that carry the name of what happened.

Texts are for people and may change. Names are stable: docs/logs.md lists them, alerts and searches may rely on them.
"""

from __future__ import annotations

import logging

EVENT_NAME = "event_name"
"""The attribute of a log record, and the field of a JSON line."""


class EventLog:
    """A logger. event: the name, in snake_case.  text, values: as for the standard library's loggers."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, text: str, *values: object, exc_info: BaseException | None = None) -> None:
        self._write(logging.DEBUG, event, text, values, exc_info)

    def info(self, event: str, text: str, *values: object) -> None:
        self._write(logging.INFO, event, text, values, None)

    def warning(self, event: str, text: str, *values: object, exc_info: BaseException | None = None) -> None:
        self._write(logging.WARNING, event, text, values, exc_info)

    def error(self, event: str, text: str, *values: object, exc_info: BaseException | None = None) -> None:
        self._write(logging.ERROR, event, text, values, exc_info)

    def exception(self, event: str, text: str, *values: object) -> None:
        """An error, with the traceback of the exception that is being handled."""
        self._write(logging.ERROR, event, text, values, True)

    def critical(self, event: str, text: str, *values: object) -> None:
        self._write(logging.CRITICAL, event, text, values, None)

    def _write(
        self, level: int, event: str, text: str, values: tuple[object, ...], exc_info: BaseException | bool | None
    ) -> None:
        self._logger.log(level, text, *values, exc_info=exc_info, extra={EVENT_NAME: event}, stacklevel=3)
