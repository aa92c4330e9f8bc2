"""Escapes untrusted text for terminals and line-based logs.

Topics, keys, headers, bodies and error texts come from producers, consumers and checked services. Terminals obey
escape sequences in them, bidirectional controls display one thing and mean another, and a line break forges a log
line. All output for people is escaped here: `tmc admin`, the messages of `tmc`, the text log.
"""

from __future__ import annotations

import re
import unicodedata

_PASSWORD = re.compile(r"(://[^/\s@:'\"]*):[^\s'\"]*@")  # to the last @: unescaped passwords may hold anything
_TOKEN = re.compile(r"([?&](?:token|password|passwd)=)[^&\s'\"]*", re.IGNORECASE)


def escaped(text: str, keep: str = "") -> str:
    r"""Write what a terminal does not show as a character as \uXXXX, as JSON does; all scripts stay readable.

    That is: controls (C0, C1), format characters (bidirectional, zero-width, tags), line and paragraph separators,
    surrogates, private and unassigned characters.  keep: characters of ours that stay, for example line breaks.
    """
    if text.isprintable():
        return text
    return "".join(each if each in keep or _shows(each) else _written(each) for each in text)


def without_secrets(text: str) -> str:
    """Mask passwords in URLs and tokens in queries, for texts that libraries wrote."""
    if "://" in text or "=" in text:
        return _TOKEN.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))
    return text


def _shows(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # the wide space of Chinese text


def _written(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
