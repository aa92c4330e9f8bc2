"""Messages as consumers receive them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tmc_client as tmc
from tmc_common.headers import ORDER_KEY, SEQUENCE


def a_message(number: int = 1, **changes: Any) -> tmc.Message:
    message = tmc.Message(
        id=f"1-1-0-{number}",
        topic="t",
        key="k",
        body=b"",
        content_type="",
        headers={},
        attempt=1,
        producer="orders",
        subscriber="coupons.default",
    )
    return replace(message, **changes)


def in_line(number: int, sequence: int | None, order_key: str = "a", **changes: Any) -> tmc.Message:
    """A message with an order key. sequence None: it is delivered out of order."""
    place = {} if sequence is None else {SEQUENCE: str(sequence)}
    return a_message(number, headers={ORDER_KEY: order_key, **place}, **changes)
