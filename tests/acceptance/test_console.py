"""The console as operators use it: processes, a browser, clicks. And whether everybody can use it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.chromium import Chromium, chromium
from tmc_storm.eventually import eventually

pytestmark = pytest.mark.services

TMC = str(Path(sys.executable).parent / "tmc")
FAILURES = 1_000
PAGES = [
    "/",
    "/search",
    "/search?q=bad-1",
    "/failures",
    "/undecided",
    "/bulk",
    "/bulk/new?action=1&topic=order.paid",
    "/topics",
    "/apps",
    "/shards",
    "/settings",
    "/proposals?all=1",
    "/alerts",
    "/audit",
    "/operators?verify=1",
]


@contextmanager
def _process(log: Path, *arguments: str) -> Iterator[str]:
    """A command that runs a console. Yields: its address."""
    with open(log, "wb") as output:
        process = subprocess.Popen([TMC, *arguments], stdout=output, stderr=output, env=os.environ, cwd=log.parent)
    try:
        said = eventually(lambda: re.search(r"onsole:? (?:on )?(http://[\w.:]+)", log.read_text()))
        eventually(lambda: _is_up(said[1]))
        yield said[1]
        process.terminate()
        assert process.wait(30) in (0, -15), log.read_text()
    finally:
        process.kill()
        process.wait()


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/healthz").text == "ok\n"
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    """A thousand deliveries failed for the same reason; one message waits for a consumer that is away."""
    folder = tmp_path_factory.mktemp("console")
    with RunningCenter(f"sqlite:///{folder}/tmc.db") as made:
        made.subscribe("pay.done", "stock")
        keys = made.keys
        with (
            tmc.connect(made.address, app="coupons", key=keys["coupons"]) as coupons,
            tmc.connect(made.address, app="orders", key=keys["orders"]) as orders,
        ):
            consumer = tmc.Consumer(coupons, prefetch=200)

            @consumer.listener("order.paid")
            def refuse(body: bytes, message: tmc.Message) -> None:
                raise tmc.Reject(f"no stock for {message.key}")

            with consumer:
                orders.publish("pay.done", b"1", key="waits-1")
                for number in range(FAILURES):
                    orders.publish("order.paid", b"{}", key=f"bad-{number}")
                eventually(lambda: _failed(made) == FAILURES)
        yield made


def _failed(center: RunningCenter) -> int:
    groups = json.loads(center.run_admin("failures", "--json").stdout).get("groups", [])
    return sum(int(group["count"]) for group in groups)


@pytest.fixture(scope="module")
def console(center: RunningCenter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("console") / "console.log"
    with _process(log, "console", "--listen", "127.0.0.1:0", "--address", center.address) as address:
        yield address


@pytest.fixture
def screen(console: str) -> Iterator[Chromium]:
    with chromium(console) as made:
        yield made


def _log_in(screen: Chromium, token: str) -> None:
    screen.open("/")
    screen.type("token", token)
    screen.click("Log in")
    eventually(lambda: screen.has("#totals"))


def test_an_operator_at_three_in_the_morning(center: RunningCenter, screen: Chromium) -> None:
    made = center.run_admin("register-operator", "ann", "--role", "admin", "--valid", "1d", "--reason", "on call")
    _log_in(screen, json.loads(made.stdout)["token"])
    eventually(lambda: screen.has("#chart canvas"))
    assert "failed deliveries need attention" in screen.text

    screen.press("/")  # a message by its key
    screen.driver.switch_to.active_element.send_keys("waits-1\n")
    eventually(lambda: "Nobody reads this subscription's messages." in screen.text)

    screen.open("/search?q=bad-7")  # one message is tried again
    assert "no stock for bad-7" in screen.text
    assert not screen.has("form[action^='/do/']")
    screen.click("Enable actions")
    screen.click("Reactivate")
    screen.type("reason", "stock is back")
    screen.click("Reactivate", "button")
    eventually(lambda: "The delivery was reactivated." in screen.text)

    screen.open("/failures")  # all that failed for that reason: counted, started, taken back
    screen.click("Reactivate all")
    eventually(lambda: screen.has("#count"))
    assert screen.first("#count").text == str(FAILURES - 1)
    screen.type("reason", "stock is back")
    screen.type("count", str(FAILURES - 1))
    screen.click("Start")
    eventually(lambda: screen.has("#progress"))
    screen.click("Stop")
    screen.type("reason", "not yet")
    screen.click("Stop", "button")
    eventually(lambda: "0 done" in screen.text and "STOPPED" in screen.text)
    assert _failed(center) == FAILURES - 1

    screen.open("/topics?topic=pay.done")  # a subscription is paused
    screen.click("Pause", "tbody summary")
    screen.type("reason", "its database is restored")
    screen.click("Pause", "tbody button")
    eventually(lambda: "The subscription was paused." in screen.text)
    assert "PAUSED" in screen.text

    screen.open("/audit?actor=ann")  # who did all this?
    for action in ("pause subscription", "stop bulk job", "start bulk job", "reactivate consumption"):
        assert action in screen.text
    screen.click("ann", "summary")
    screen.click("Log out")
    eventually(lambda: screen.has("[name=token]"))


def test_a_viewer_has_no_buttons(center: RunningCenter, screen: Chromium) -> None:
    made = center.run_admin("register-operator", "vic", "--role", "viewer", "--reason", "looks")
    _log_in(screen, json.loads(made.stdout)["token"])
    for page in PAGES:
        screen.open(page)
        assert not screen.has("form[action^='/do/']"), page


def test_the_chart_gets_numbers_until_the_session_ends(center: RunningCenter, console: str) -> None:
    with httpx.Client(base_url=console, follow_redirects=True, timeout=30) as browser:
        browser.post("/login", data={"token": center.token, "next": "/shards"})
        with browser.stream("GET", "/events", headers={"accept": "text/event-stream"}) as events:
            lines = events.iter_lines()
            first = json.loads(next(line for line in lines if line).removeprefix("data: "))
            assert {"now", "submitted", "acked", "backlog", "failed", "undecided"} == set(first)
            csrf = re.search(r'name="csrf" value="([^"]+)"', browser.get("/shards").text)
            assert csrf is not None
            browser.post("/logout", data={"csrf": csrf[1]})
            assert all(line.startswith("data: ") or not line for line in lines)  # until it ends


def test_rows_are_reached_by_keyboard(center: RunningCenter, screen: Chromium) -> None:
    _log_in(screen, center.token)
    screen.open("/search")
    for keys in "jjk":
        screen.press(keys)
    assert screen.first("tr.chosen td").text == screen.first("table.rows tbody tr td").text
    screen.press("?")
    assert screen.first("dialog").is_displayed()


def test_everybody_can_use_every_page(center: RunningCenter, screen: Chromium, tmp_path: Path) -> None:
    """axe-core finds nothing serious, in light and dark, on a desktop and on a phone; no page is wider than its window."""
    _log_in(screen, center.token)
    screen.click("Enable actions")
    shots = Path(os.environ.get("TMC_SCREENSHOTS", tmp_path))
    for page in PAGES:
        for colors, size in (("light", "desktop"), ("dark", "desktop"), ("light", "phone")):
            screen.colors(colors)
            screen.size(size)
            screen.open(page)
            assert screen.complaints() == [], (page, colors, size)
            assert not screen.overflows(), (page, size)
            name = re.sub(r"\W+", "-", page).strip("-") or "overview"
            screen.driver.save_screenshot(str(shots / f"{name}-{colors}-{size}.png"))


def test_the_development_center_has_one_that_asks_for_no_token(tmp_path: Path) -> None:
    with _process(tmp_path / "dev.log", "dev", "--port", "0", "--console-port", "0") as address:
        with httpx.Client(base_url=address, follow_redirects=True) as browser:
            assert "developer" in browser.get("/").text
            assert browser.get("/", headers={"host": "evil.example"}).status_code == 400


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--listen", "0.0.0.0:0"], "Tokens would travel in the clear to 0.0.0.0:0"),
        (["--address", "center.example:50051"], "Tokens would travel in the clear to center.example:50051"),
        (["--listen", "nowhere"], "--listen 'nowhere' is no address"),
        (["--tls-key", "x"], "--tls-certificate and --tls-key go together"),
    ],
)
def test_a_mistake_gets_one_sentence(arguments: list[str], sentence: str) -> None:
    done = subprocess.run([TMC, "console", *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, sentence in done.stderr, len(done.stderr.splitlines())) == (2, True, 1)
