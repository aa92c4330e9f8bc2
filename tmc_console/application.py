"""The Starlette application: routes, middleware, login, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from tmc_common.protocol import admin_pb2
from tmc_console.center import Refused
from tmc_console.guards import BodyLimit, Headers, is_ours, local_path
from tmc_console.pages import bulk, catalog, failures, messages, overview, records, servers, steering
from tmc_console.sessions import LONGEST_S
from tmc_console.sso_names import LOGIN_COOKIE, LOGIN_S, LoginFailed
from tmc_console.view import LANGUAGE_COOKIE, THEME_COOKIE, Setting, View, here, render
from tmc_console.words import LANGUAGES

Page = Callable[[View], Awaitable[Response]]
_YEAR_S = 31_536_000
_BY_ITSELF = ("/events", "/progress")  # what a page asks for without anybody doing something

_PAGES: Sequence[tuple[str, Page]] = (
    ("/", overview.page),
    ("/events", overview.events),
    ("/search", messages.search),
    ("/messages/{id}", messages.page),
    ("/failures", failures.page),
    ("/undecided", failures.undecided),
    ("/topics", catalog.topics),
    ("/apps", catalog.apps),
    ("/bulk", bulk.jobs),
    ("/bulk/new", bulk.new),
    ("/bulk/{job:int}", bulk.job),
    ("/bulk/{job:int}/progress", bulk.progress),
    ("/shards", servers.page),
    ("/settings", servers.settings),
    ("/proposals", records.proposals),
    ("/alerts", records.alerts),
    ("/audit", records.audit),
    ("/audit.csv", records.audit_csv),
    ("/operators", records.operators),
)
_FORMS: Sequence[tuple[str, Page]] = (
    ("/do/{action}", steering.act),
    ("/bulk/start", bulk.start),
    ("/writing", steering.switch_writing),
)


class _Static(StaticFiles):
    """Files of this package. Those of others carry their version in their names, so browsers keep them."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        lasting = path.startswith("vendor/")
        response.headers["cache-control"] = f"public, max-age={_YEAR_S}, immutable" if lasting else "no-cache"
        return response


def application(setting: Setting, hosts: Sequence[str]) -> Starlette:
    """hosts: names that browsers may use for this console; a page of another site cannot pretend to be it."""
    shown = [Route(path, partial(_show, setting, page), methods=["GET"]) for path, page in _PAGES]
    forms = [Route(path, partial(_change, setting, page), methods=["POST"]) for path, page in _FORMS]

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await setting.close()

    made = Starlette(
        routes=[
            Route("/login", partial(_login, setting), methods=["GET", "POST"]),
            Route("/login/sso", partial(_begin_sso, setting), methods=["GET"]),
            Route("/login/sso/back", partial(_finish_sso, setting), methods=["GET"]),
            Route("/logout", partial(_logout, setting), methods=["POST"]),
            Route("/preferences", _preferences, methods=["POST"]),
            Route("/healthz", _healthz),
            Mount("/static", _Static(directory=Path(__file__).parent / "static")),
            *forms,
            *shown,
        ],
        middleware=[
            Middleware(Headers, secure=setting.secure),
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
            Middleware(BodyLimit),
        ],
        exception_handlers={404: _not_found, 405: _not_found},
        lifespan=lifespan,
    )
    made.state.setting = setting
    return made


async def _show(setting: Setting, page: Page, request: Request) -> Response:
    view = await _view(setting, request)
    if view is None:
        return _to_login(request)
    return await _answered(setting, view, page)


async def _change(setting: Setting, page: Page, request: Request) -> Response:
    view = await _view(setting, request)
    if view is None:
        return RedirectResponse("/login", status_code=303)
    form = await request.form()
    request.state.next = local_path(str(form.get("next", "/")))
    if not is_ours(request, str(form.get("csrf", "")), view.session.csrf):
        return view.page("error.html", 403, title="This form is not from this console: open the page again.", reason="")
    return await _answered(setting, view, page)


async def _answered(setting: Setting, view: View, page: Page) -> Response:
    try:
        return await page(view)
    except Refused as exc:
        if exc.reason == "ADMIN_ONLY" and setting.open_token is None:  # expired, rotated or removed meanwhile
            setting.sessions.end(view.request.cookies.get(setting.cookie, ""))
            return _to_login(view.request)
        return view.page("error.html", exc.status, title=exc.sentence, reason=exc.reason)


def _to_login(request: Request) -> Response:
    address = f"/login?next={quote(here(request))}"
    if "hx-request" in request.headers:  # or the login would be shown inside the page
        return Response(status_code=401, headers={"hx-redirect": address})
    return RedirectResponse(address, status_code=303)


async def _view(setting: Setting, request: Request) -> View | None:
    """Return what the operator sees; None if not logged in."""
    is_used = not request.url.path.endswith(_BY_ITSELF)
    session = setting.sessions.find(request.cookies.get(setting.cookie, ""), is_used=is_used)
    return View(request, setting, session) if session is not None else None


async def _login(setting: Setting, request: Request) -> Response:
    next_path = local_path(request.query_params.get("next", "/"))
    token = setting.open_token
    if request.method == "POST":
        form = await request.form()
        token, next_path = str(form.get("token", "")).strip()[:1_000], local_path(str(form.get("next", "/")))
        if not is_ours(request, "", ""):
            return render(request, "error.html", 403, title="This form is from another site.", reason="")
    if token is None or (request.method == "POST" and not token):
        return _login_page(setting, request, next_path)
    try:
        operator = await _who(setting, token)
    except Refused as exc:
        sentence = "Invalid token: it may have expired." if exc.status == 401 else exc.sentence
        return _login_page(setting, request, next_path, exc.status, sentence)
    response = RedirectResponse(next_path, status_code=303)
    _begin_session(setting, request, response, token, operator)
    return response


def _login_page(setting: Setting, request: Request, next_path: str, status: int = 200, error: str = "") -> Response:
    return render(request, "login.html", status, next=next_path, error=error, sso=setting.sso is not None)


def _begin_session(
    setting: Setting, request: Request, response: Response, token: str, operator: admin_pb2.Operator
) -> None:
    setting.sessions.end(request.cookies.get(setting.cookie, ""))
    response.set_cookie(
        setting.cookie,
        setting.sessions.begin(token, operator),
        httponly=True,
        samesite="strict",
        secure=setting.secure,
        path="/",
        max_age=int(LONGEST_S),
    )


async def _begin_sso(setting: Setting, request: Request) -> Response:
    if setting.sso is None:
        return await _not_found(request, HTTPException(404))
    next_path = local_path(request.query_params.get("next", "/"))
    scheme = "https" if setting.secure else "http"
    back = f"{scheme}://{request.headers['host']}/login/sso/back"
    try:
        url, cookie = await setting.sso.begin(back, next_path)
    except LoginFailed as exc:
        return _login_page(setting, request, next_path, 502, str(exc))
    response = RedirectResponse(url, status_code=303)
    # Lax: the provider's page leads back here.
    name, seconds = setting.cookie_named(LOGIN_COOKIE), int(LOGIN_S)
    response.set_cookie(name, cookie, httponly=True, samesite="lax", secure=setting.secure, path="/", max_age=seconds)
    return response


async def _finish_sso(setting: Setting, request: Request) -> Response:
    if setting.sso is None:
        return await _not_found(request, HTTPException(404))
    query, name = request.query_params, setting.cookie_named(LOGIN_COOKIE)
    try:
        token, next_path = await setting.sso.finish(
            query.get("state", ""), query.get("code", ""), request.cookies.get(name, "")
        )
        operator = await _who(setting, token)
    except LoginFailed as exc:
        return _login_page(setting, request, "/", 403, str(exc))
    except Refused as exc:
        sentence = (
            ("The center refuses this login: unknown identity, or a token for another program.")
            if exc.status == 401
            else exc.sentence
        )
        return _login_page(setting, request, "/", exc.status, sentence)
    # A page of ours in between: after a redirect from another site, browsers would not send the session's cookie.
    response = render(request, "onward.html", next=local_path(next_path))
    response.delete_cookie(name, path="/", secure=setting.secure, httponly=True, samesite="lax")
    _begin_session(setting, request, response, token, operator)
    return response


async def _who(setting: Setting, token: str) -> admin_pb2.Operator:
    """Raises Refused. Uses its own connection: invalid tokens are answered late and must not delay logged-in operators."""
    if not (token.isascii() and token.isprintable()):
        raise Refused(401, "ADMIN_ONLY", "Invalid token: it may have expired.")
    if setting.logins.locked():
        raise Refused(429, "", "Too many logins: try again in a few seconds.")
    async with setting.logins:
        found: admin_pb2.Operator = await setting.login_center.ask(token, "WhoAmI")
    return found


async def _logout(setting: Setting, request: Request) -> Response:
    cookie = request.cookies.get(setting.cookie, "")
    session = setting.sessions.find(cookie)
    form = await request.form()
    response = RedirectResponse("/login", status_code=303)
    if session is not None and is_ours(request, str(form.get("csrf", "")), session.csrf):
        setting.sessions.end(cookie)
        response.delete_cookie(setting.cookie, path="/", secure=setting.secure, httponly=True, samesite="strict")
    return response


async def _preferences(request: Request) -> Response:
    """Language and colors: browser settings, so no login is required."""
    form = await request.form()
    response = RedirectResponse(local_path(str(form.get("next", "/"))), status_code=303)
    language, theme = str(form.get("language", "")), str(form.get("theme", ""))
    if language in LANGUAGES:
        response.set_cookie(LANGUAGE_COOKIE, language, max_age=_YEAR_S, httponly=True, samesite="strict")
    if theme in ("dark", "light", "auto"):
        response.set_cookie(THEME_COOKIE, theme, max_age=_YEAR_S, httponly=True, samesite="strict")
    return response


async def _healthz(_request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _not_found(request: Request, _exc: Exception) -> Response:
    return render(request, "error.html", 404, title="Page not found.", reason="")
