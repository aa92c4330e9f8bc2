"""A console over a running center, for tests: as an ASGI application with a client that behaves as a browser does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from tests.support.center import RunningCenter
from tmc_console.running import ConsoleConfig, made
from tmc_console.sessions import Session, Sessions

BASE = "http://127.0.0.1:50052"


class Browser:
    """One browser. What it is redirected to is fetched too, unless a test says otherwise."""

    def __init__(self, client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop, sessions: Sessions) -> None:
        self._client = client
        self._sessions = sessions
        self._loop = loop
        self.csrf = ""

    def get(self, path: str, **more: Any) -> httpx.Response:
        answer = self._loop.run_until_complete(self._client.get(path, **{"follow_redirects": True, **more}))
        found = re.search(r'name="csrf" value="([^"]+)"', answer.text)
        if found:
            self.csrf = found[1]
        return answer

    def post(self, path: str, fields: dict[str, Any] | None = None, **more: Any) -> httpx.Response:
        """A form of a page that this browser has seen."""
        data = {"csrf": self.csrf, **(fields or {})}
        return self._loop.run_until_complete(self._client.post(path, data=data, **{"follow_redirects": True, **more}))

    def at_once(self, forms: Sequence[tuple[str, dict[str, Any]]]) -> list[int]:
        """Send all of these at the same time. Returns: the statuses."""

        async def send() -> list[httpx.Response]:
            return await asyncio.gather(*(self._client.post(path, data=fields) for path, fields in forms))

        return [answer.status_code for answer in self._loop.run_until_complete(send())]

    def log_in(self, token: str) -> httpx.Response:
        self.post("/login", {"token": token, "next": "/"})
        return self.get("/")

    def switch_actions_on(self) -> None:
        self.post("/writing", {"on": "1", "next": "/"})

    @property
    def session(self) -> Session:
        """The console's side of it."""
        found = self._sessions.find(self.cookies["tmc_console"])
        assert found is not None
        return found

    @property
    def cookies(self) -> httpx.Cookies:
        return self._client.cookies


@contextmanager
def browser(center: RunningCenter, **config: Any) -> Iterator[Browser]:
    console = made(ConsoleConfig(listen="127.0.0.1:50052", center=center.address, **config))
    loop = asyncio.new_event_loop()
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=console), base_url=BASE)
    try:
        yield Browser(client, loop, console.state.setting.sessions)
    finally:
        loop.run_until_complete(client.aclose())
        loop.run_until_complete(console.state.setting.close())
        loop.close()
