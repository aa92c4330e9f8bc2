"""What a page needs: who asks, the center, templates and words."""

from __future__ import annotations

import asyncio
import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from google.protobuf.message import Message
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tmc_common.enums import name_of
from tmc_common.protocol import admin_pb2, types_pb2
from tmc_console import words
from tmc_console.actions import ACTIONS
from tmc_console.center import Center
from tmc_console.sessions import Session, Sessions

COOKIE = "tmc_console"
LANGUAGE_COOKIE = "tmc_language"
THEME_COOKIE = "tmc_theme"
PAGE_SIZE = 50
LOGINS = 240  # at once: the center answers wrong tokens late, on a connection that takes 256 calls
_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the whole console shares. open_token: of a center that lets everybody in; None: operators log in.

    secure: browsers reach it over TLS.  sso: None: operators log in with tokens only.
    """

    center: Center
    login_center: Center
    sessions: Sessions
    logins: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LOGINS))
    open_token: str | None = None
    secure: bool = False
    sso: Any = None

    async def close(self) -> None:
        await self.center.close()
        await self.login_center.close()

    @property
    def cookie(self) -> str:
        return self.cookie_named(COOKIE)

    def cookie_named(self, name: str) -> str:
        """Return the name of a cookie, with the prefix that keeps other hosts and plaintext out."""
        return f"__Host-{name}" if self.secure else name


class View:
    """One request of a logged-in operator."""

    def __init__(self, request: Request, setting: Setting, session: Session) -> None:
        self.request = request
        self.setting = setting
        self.session = session
        self.language = language_of(request)

    @property
    def may_write(self) -> bool:
        return self.setting.sessions.may_write(self.session)

    async def ask(self, rpc: str, filled: Message | None = None, **fields: Any) -> Any:
        """Call the admin service as this operator, see Center.ask. Raises Refused."""
        return await self.setting.center.ask(self.session.token, rpc, filled, **fields)

    def query(self, name: str) -> str:
        return self.request.query_params.get(name, "")[:1_000]

    def number(self, name: str) -> int:
        """A small number of the address; 0: there is none."""
        text = self.query(name)
        return int(text) if re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) else 0

    def page(self, template: str, status: int = 200, **values: Any) -> Response:
        return render(self.request, template, status, view=self, session=self.session, **values)

    def notice(self) -> str:
        """Return what was done last; "" the second time."""
        notice, self.session.notice = self.session.notice, ""
        return notice

    def may(self, action: str) -> bool:
        """Return whether this action is shown to this operator now. The center decides when it is called."""
        return self.may_write and self.session.operator.role >= ACTIONS[action].role

    def goto(self, path: str) -> Response:
        return RedirectResponse(path, status_code=303)


def language_of(request: Request) -> str:
    chosen = request.cookies.get(LANGUAGE_COOKIE, "")
    return chosen if chosen in words.LANGUAGES else words.preferred(request.headers.get("accept-language", ""))


def here(request: Request) -> str:
    """The page being viewed; for a form, the page it is on."""
    if request.method == "POST":
        return str(getattr(request.state, "next", "/"))
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


def render(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    language = language_of(request)
    theme = request.cookies.get(THEME_COOKIE, "")
    html = _TEMPLATES.get_template(template).render(
        **{"view": None, "session": None, **values},
        _=words.words(language),
        language=language,
        languages=words.LANGUAGES,
        theme=theme if theme in ("dark", "light") else "",
        path=request.url.path,
        here=here(request),
        Role=admin_pb2.Role,
    )
    return HTMLResponse(html, status)


def _visible(text: Any) -> str:
    r"""Write what a browser would hide or reorder as \uXXXX: controls, bidirectional and zero-width characters."""
    return "".join(map(_shown, str(text).replace("\r\n", "\n")))


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _as_it_is(text: Any) -> Markup:
    """Escape a field of a form, which is sent back, and change nothing else."""
    return escape(str(text))


def _state(number: int, kind: str) -> str:
    enum = types_pb2.MessageState if kind == "message" else types_pb2.ConsumptionState
    return name_of(enum.DESCRIPTOR, number)


def _named(number: int, enum: str) -> str:
    """The short name of a value of an enum of the admin service."""
    return name_of(getattr(admin_pb2, enum).DESCRIPTOR, number)


def _spark(counts: Any, width: int = 120, height: int = 24) -> str:
    """Points of a polyline."""
    most = max([*counts, 1])
    step = width / max(len(counts) - 1, 1)
    return " ".join(
        f"{place * step:.1f},{height - 1 - (height - 2) * count / most:.1f}" for place, count in enumerate(counts)
    )


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    finalize=lambda value: value if isinstance(value, Markup) else _visible(value),
)
_TEMPLATES.filters.update(
    utc=words.utc, span=words.span, state=_state, named=_named, spark=_spark, printed=words.printed, asis=_as_it_is
)
