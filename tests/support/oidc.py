"""A small OpenID provider in a process of its own, and the ID tokens that it gives to people who log in."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx

from tmc_storm.eventually import eventually
from tmc_storm.services.ports import end, free_port

CLIENT = "tmc"
ANN, STRANGER = "ann@example.com", "eve@example.com"
_BACK = "http://127.0.0.1:1/back"


@contextmanager
def provider() -> Iterator[str]:
    """Yields: its issuer."""
    port = free_port()
    users = [
        part
        for name in (ANN, STRANGER)
        for part in ("--user-claims", json.dumps({"sub": name, "email": name, "email_verified": True}))
    ]
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "oidc-provider-mock"), "--port", str(port), *users],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://localhost:{port}"
        eventually(lambda: _is_up(url))
        yield url
    finally:
        end(process, signal.SIGTERM)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/.well-known/openid-configuration").status_code == 200
    except httpx.TransportError:
        return False


def id_token(issuer: str, subject: str, client: str = CLIENT) -> str:
    """By the code flow, as a program that logs somebody in does."""
    asked = {
        "response_type": "code",
        "client_id": client,
        "redirect_uri": _BACK,
        "scope": "openid email",
        "state": "s",
        "nonce": secrets.token_hex(8),
    }
    with httpx.Client() as browser:
        described = browser.get(f"{issuer}/.well-known/openid-configuration").json()
        page = str(httpx.URL(described["authorization_endpoint"]).copy_merge_params(asked))
        code = parse_qs(urlsplit(browser.post(page, data={"sub": subject}).headers["location"]).query)["code"][0]
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": _BACK, "client_id": client}
        answer = browser.post(described["token_endpoint"], data=form, auth=(client, "s3cret"))
        return str(answer.json()["id_token"])
