"""Which errors are the same one: their text without what differs from message to message."""

from __future__ import annotations

import re
from hashlib import blake2b

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_NUMBERED = re.compile(r"\b(?=[\w-]*[0-9])[\w-]+|[0-9]+")  # numbers, and words with digits: ids, addresses, digests


def fingerprint(error: str) -> str:
    """12 hex digits. Texts that differ in numbers, ids, quoted values and blanks only have the same one.

    >>> fingerprint("KeyError: 'order-17' not in 42") == fingerprint("KeyError: 'order-9' not in 1337")
    True
    >>> fingerprint("Timeout after 3 s") == fingerprint("Refused after 3 s")
    False
    """
    text = " ".join(_NUMBERED.sub("#", _QUOTED.sub("?", error)).split())
    return blake2b(text.encode("utf-8", "replace"), digest_size=6).hexdigest()
