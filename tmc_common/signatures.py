"""Signatures of copies: how the center proves to consumers that it made what they read from a broker's queue.

A copy carries the header HEADER: `v1=KEY_ID:MAC`. The MAC is HMAC-SHA256, under a key of the subscription, of everything
that a handler can see: see `content`. KEY_ID names the subscription's key that was used, so a consumer knows whether
it has to ask for a new one. Center and SDK both use this module; docs/signatures.md describes it for other languages.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from functools import lru_cache

HEADER = "tmc-signature"
_VERSION = "v1="


def body_digest(body: bytes) -> bytes:
    """SHA-256; the same for all subscriptions of a message."""
    return hashlib.sha256(body).digest()


def content(
    *,
    message_id: str,
    attempt: int,
    topic: str,
    key: str,
    content_type: str,
    producer: str,
    subscriber: str,
    interval_ms: int,
    body_digest: bytes,
    headers: Mapping[str, str],
) -> bytes:
    """Return everything that is signed, as netstrings (`LENGTH:BYTES,`); no two copies share an encoding.

    headers: as the user named them, see tmc_common.headers; they come last, sorted by the bytes of their names.
    """
    known = _start(topic, producer, subscriber, interval_ms, content_type)
    number, own_key = message_id.encode(), key.encode()
    tried = b"%d" % attempt
    signed = b"%b%d:%b,%d:%b,%d:%b,%d:%b," % (
        known,
        len(number),
        number,
        len(tried),
        tried,
        len(own_key),
        own_key,
        len(body_digest),
        body_digest,
    )
    for name in sorted(headers) if headers else ():  # code points sort as their UTF-8 does
        signed += netstring(name) + netstring(headers[name])
    return signed


@lru_cache(4096)
def _start(topic: str, producer: str, subscriber: str, interval_ms: int, content_type: str) -> bytes:
    """Return what is the same for most copies of a subscription."""
    return b"".join(map(netstring, (topic, producer, subscriber, str(interval_ms), content_type)))


def netstring(text: str) -> bytes:
    """Return LENGTH:BYTES, of a text in UTF-8."""
    encoded = text.encode()
    return b"%d:%b," % (len(encoded), encoded)


@lru_cache(65_536)
def key_id(secret: bytes) -> str:
    """A short identifier of the key that reveals nothing about it."""
    return hashlib.sha256(secret).hexdigest()[:8]


@lru_cache(65_536)
def _keyed(secret: bytes) -> hmac.HMAC:
    return hmac.new(secret, digestmod="sha256")


def sign(secret: bytes, signed: bytes) -> str:
    """The value of HEADER."""
    mac = _keyed(secret).copy()  # hmac.digest would release the GIL each time and then wait for busy threads
    mac.update(signed)
    return f"{_VERSION}{key_id(secret)}:{mac.hexdigest()}"


def key_id_of(signature: object) -> str:
    """The key id in a signature; "": it is not a signature of this version."""
    if not isinstance(signature, str) or not signature.startswith(_VERSION):
        return ""
    return signature[len(_VERSION) :].partition(":")[0]


def verify(secret: bytes, signed: bytes, signature: str) -> bool:
    """Verify a signature with a constant-time comparison."""
    return signature.isascii() and hmac.compare_digest(sign(secret, signed), signature)
