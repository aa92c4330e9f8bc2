"""English and Chinese, times and numbers. Pages are written in English; the other language is looked up."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from tmc_console.chinese import CHINESE

LANGUAGES = {"en": "English", "zh": "中文"}
_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))
_LONGEST_TEXT = 65_536


def words(language: str) -> Callable[[str], str]:
    """Return what translates. A text that is not known stays as it is."""
    return (lambda text: CHINESE.get(text, text)) if language == "zh" else (lambda text: text)


def preferred(accepted: str) -> str:
    """accepted: the header Accept-Language."""
    for part in accepted.split(","):
        language = part.split(";")[0].strip().lower()[:2]
        if language in LANGUAGES:
            return language
    return "en"


def utc(ms: int) -> str:
    """A time to the millisecond; "": none."""
    if not ms:
        return ""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"
    except (ValueError, OverflowError):
        return f"{ms} ms"


def span(ms: int) -> str:
    """A duration in its largest unit."""
    for size, unit in _UNITS:
        if abs(ms) >= size:
            return f"{abs(ms) // size} {unit}"
    return "0 s"


def printed(body: bytes) -> str:
    """A body as text, or as hexadecimal digits where it is none; what is very long is cut."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = body[: _LONGEST_TEXT // 2].hex(" ")
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
