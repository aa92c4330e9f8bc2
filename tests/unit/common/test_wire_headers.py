"""User headers and the names that RabbitMQ takes for its own."""

from __future__ import annotations

import pytest

from tmc_common.headers import from_wire, to_wire


@pytest.mark.parametrize("name", ["CC", "BCC", "cc", "x-delay", "x-delivery-count", "X-Death"])
def test_a_name_of_the_broker_travels_under_a_prefix_and_comes_back(name: str) -> None:
    assert to_wire({name: "value"}) == {f"tmc-user-{name}": "value"}
    assert from_wire(to_wire({name: "value"})) == {name: "value"}


@pytest.mark.parametrize("name", ["color", "traceparent", "tmc-forward-key", "Cc-list", "xray"])
def test_other_names_stay_as_they_are(name: str) -> None:
    assert to_wire({name: "value"}) == {name: "value"}
    assert from_wire({name: "value"}) == {name: "value"}


def test_what_the_broker_adds_does_not_reach_the_handler() -> None:
    assert from_wire({"x-delivery-count": 1, "color": "red"}) == {"color": "red"}
