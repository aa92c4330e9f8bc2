"""What the texts of failed calls say about a server that speaks another protocol."""

from __future__ import annotations

# Of gRPC, its older versions, OpenSSL, and httpx: they offer nothing but texts.
_TEXTS = {
    "Expected SETTINGS frame": "HTTP/1, not gRPC",
    "http1.x server": "HTTP/1, not gRPC",
    "WRONG_VERSION_NUMBER": "no TLS",
    "illegal status line": "no HTTP/1",
    "illegal request line": "no HTTP/1",
}


def spoken_instead(details: str) -> str:
    """Return what the other side of a failed call speaks instead of what was expected; "": nothing is known."""
    return next((spoken for text, spoken in _TEXTS.items() if text in details), "")
