"""A WSGI application that is loaded before its server forks. PLACES: of the JSON with the places."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import tmc_client as tmc
from tests.integration.surroundings.guest import TOPIC, read_places, use_places

_center = tmc.connect(read_places(os.environ["PLACES"])[0].center, app="orders")
_center.publish(TOPIC, {}, key=f"loaded-{uuid.uuid4().hex}")


def application(_environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    _center.publish(TOPIC, {}, key=f"asked-{uuid.uuid4().hex}")  # over what was made before the fork
    found = use_places(os.environ["PLACES"])
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(found).encode()]
