"""The console over a real center: who gets in, what is shown, what is changed, and what strangers can do."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import tmc_client as tmc
from tests.integration.server.test_api import Api
from tests.support.center import RunningCenter
from tests.support.console import Browser, browser
from tmc_common.protocol import admin_pb2, consumption_pb2, types_pb2
from tmc_console.pages.overview import MOST_OF_ONE
from tmc_console.view import LOGINS
from tmc_server.domain.placement import MoveStep
from tmc_server.store.engines import Database
from tmc_server.store.tables import shard_move
from tmc_storm.eventually import eventually

PAGES = [
    "/",
    "/search",
    "/search?q=bad-0",
    "/failures",
    "/undecided",
    "/bulk",
    "/bulk/new",
    "/topics",
    "/apps",
    "/shards",
    "/settings",
    "/settings?all=1",
    "/proposals",
    "/proposals?all=1",
    "/alerts",
    "/alerts?resolved=1",
    "/audit",
    "/audit.csv",
    "/operators",
    "/operators?verify=1",
]
TOPIC = "order.paid"


class Setting:
    """A center with messages, some of them failed, and tokens of operators."""

    def __init__(self, center: RunningCenter, channel: grpc.Channel) -> None:
        self.center, self.api = center, Api(center, channel)
        self.tokens = {
            name: self.register(name, role, *topics)
            for name, role, topics in (
                ("viewer", 1, ()),
                ("operator", 2, ()),
                ("administrator", 3, ()),
                ("limited", 2, ("order.",)),
            )
        }
        center.subscribe("pay.done", "coupons")
        self.ids: dict[str, str] = {}
        with self.connect("orders") as orders, self.connect("coupons") as coupons:
            consumer = tmc.Consumer(coupons)

            @consumer.listener(TOPIC)
            def refuse(body: bytes, message: tmc.Message) -> None:
                if message.key.startswith("bad"):
                    raise tmc.Reject(f"no stock for {message.key}")

            with consumer:
                for key in ("good-1", *(f"bad-{number}" for number in range(6))):
                    self.ids[key] = orders.publish(TOPIC, b'{"secret": 1}', key=key)
                self.ids["pay"] = orders.publish("pay.done", b"secret", key="pay")
                eventually(lambda: self.failed() == 6)

    def connect(self, app: str) -> Any:
        return tmc.connect(self.center.address, app=app, key=self.center.keys[app])

    def register(self, name: str, role: int, *topics: str, **more: Any) -> str:
        request = admin_pb2.RegisterOperatorRequest(
            name=name, role=admin_pb2.Role.Name(role), topics=topics, reason="test", **more
        )
        return str(self.api("AdminService/RegisterOperator", request).token)

    def failed(self) -> int:
        request = admin_pb2.ListFailureGroupsRequest(topic=TOPIC)
        return sum(group.count for group in self.api("AdminService/ListFailureGroups", request).groups)

    def state(self, key: str) -> int:
        (delivery,) = self.center.detail(TOPIC, key).consumptions
        return int(delivery.state)

    def is_paused(self) -> bool:
        topics = self.api("AdminService/ListTopics", admin_pb2.ListTopicsRequest()).topics
        return any(topic.paused for topic in topics if topic.name == TOPIC)

    def audit(self, **wanted: Any) -> list[Any]:
        return list(self.api("AdminService/ListAudit", admin_pb2.ListAuditRequest(**wanted)).entries)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("console")
    with RunningCenter(f"sqlite:///{folder}/tmc.db") as center, grpc.insecure_channel(center.address) as channel:
        yield Setting(center, channel)


@pytest.fixture
def guest(setting: Setting) -> Iterator[Browser]:
    """Nobody is logged in."""
    with browser(setting.center) as made:
        yield made


@pytest.fixture
def admin(setting: Setting, guest: Browser) -> Browser:
    """The administrator, with actions switched on."""
    guest.log_in(setting.tokens["administrator"])
    guest.switch_actions_on()
    return guest


class TestLogin:
    @pytest.mark.parametrize("path", PAGES)
    def test_without_one_every_page_leads_to_the_login(self, guest: Browser, path: str) -> None:
        answer = guest.get(path, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"].partition("?")[0]) == (303, "/login")

    def test_a_wrong_token_is_refused(self, guest: Browser) -> None:
        answer = guest.post("/login", {"token": "wrong"})
        assert (answer.status_code, "Invalid token" in answer.text) == (401, True)
        assert "set-cookie" not in answer.headers

    def test_the_cookie_says_nothing_and_is_another_one_each_time(self, setting: Setting, guest: Browser) -> None:
        cookies = []
        for _ in range(2):
            answer = guest.post("/login", {"token": setting.tokens["viewer"]}, follow_redirects=False)
            cookie = answer.headers["set-cookie"]
            assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
            assert setting.tokens["viewer"] not in cookie
            cookies.append(cookie.partition(";")[0])
        assert cookies[0] != cookies[1]
        guest.cookies.clear()
        stale = guest.get("/", headers={"cookie": cookies[0]}, follow_redirects=False)
        assert stale.status_code == 303  # the login ended the session before it

    def test_over_tls_the_cookie_is_of_this_host_only(self, setting: Setting) -> None:
        with browser(setting.center, secure=True) as made:
            answer = made.post("/login", {"token": setting.tokens["viewer"]}, follow_redirects=False)
        assert answer.headers["set-cookie"].startswith("__Host-tmc_console=")
        assert "Secure" in answer.headers["set-cookie"]
        assert "max-age" in answer.headers["strict-transport-security"]

    def test_logging_out_ends_the_session_in_the_console_too(self, setting: Setting, guest: Browser) -> None:
        guest.log_in(setting.tokens["viewer"])
        stolen = guest.cookies["tmc_console"]
        guest.post("/logout")
        answer = guest.get("/", headers={"cookie": f"tmc_console={stolen}"}, follow_redirects=False)
        assert answer.status_code == 303

    def test_a_token_that_was_removed_meanwhile_ends_the_session(self, setting: Setting, guest: Browser) -> None:
        token = setting.register("leaving", 1)
        assert guest.log_in(token).status_code == 200
        setting.api("AdminService/RemoveOperator", admin_pb2.RemoveOperatorRequest(name="leaving", reason="left"))
        answer = guest.get("/topics", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/topics")

    def test_an_open_center_asks_for_no_token(self, setting: Setting) -> None:
        with browser(setting.center, open_token=setting.tokens["viewer"]) as made:
            assert "Overview" in made.get("/").text


def test_a_shard_on_its_way_is_shown_with_its_progress(setting: Setting, guest: Browser) -> None:
    guest.log_in(setting.tokens["viewer"])
    assert "Moves" not in guest.get("/shards").text
    database = Database(setting.center.config.store.catalog.get_secret_value())
    places = {"shard": 7, "source": "s" * 32, "target": "t" * 32, "run": "", "position": "{}"}
    rows = {"step": int(MoveStep.COPYING), "copied": 1_200, "expected": 5_000}
    times = {"started_ms": 1_790_000_000_000, "updated_ms": 1_790_000_060_000}
    with database.engine.begin() as connection:
        connection.execute(shard_move.insert().values(**places, **rows, **times))
    shown = guest.get("/shards").text
    with database.engine.begin() as connection:
        connection.execute(shard_move.delete())
    database.close()
    assert re.search(r'<th scope="row">07</th><td>t{32}</td><td><span class="badge copying">COPYING', shown)
    assert "1,200 / 5,000" in shown


class TestStrangers:
    def test_every_answer_forbids_frames_scripts_of_others_and_storing(self, admin: Browser) -> None:
        for path in [*PAGES, "/nothing-here", "/login"]:
            headers = admin.get(path).headers
            assert "frame-ancestors 'none'" in headers["content-security-policy"], path
            assert "script-src 'self'" in headers["content-security-policy"]
            assert (headers["x-frame-options"], headers["x-content-type-options"]) == ("DENY", "nosniff")
            assert headers["cache-control"] == "no-store"
            assert "server" not in headers

    def test_another_name_for_this_host_is_refused(self, admin: Browser) -> None:
        assert admin.get("/", headers={"host": "evil.example"}).status_code == 400

    @pytest.mark.parametrize(
        "headers",
        [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}],
    )
    def test_a_form_of_another_site_changes_nothing(
        self, setting: Setting, admin: Browser, headers: dict[str, str]
    ) -> None:
        form = {"name": TOPIC, "reason": "x", "next": "/"}
        assert admin.post("/do/pause-topic", form, headers=headers).status_code == 403
        assert not setting.is_paused()

    def test_a_form_without_the_sessions_token_changes_nothing(self, setting: Setting, admin: Browser) -> None:
        for csrf in ("", "x", "é"):
            answer = admin.post("/do/pause-topic", {"name": TOPIC, "reason": "x", "csrf": csrf})
            assert answer.status_code == 403
        assert not setting.is_paused()
        assert admin.get("/do/pause-topic").status_code == 404

    @pytest.mark.parametrize("next_", ["https://evil.example/", "//evil.example", "/\\evil.example"])
    def test_nobody_is_sent_elsewhere(self, setting: Setting, guest: Browser, next_: str) -> None:
        form = {"token": setting.tokens["viewer"], "next": next_}
        assert guest.post("/login", form, follow_redirects=False).headers["location"] == "/"
        for path in ("/preferences", "/writing"):
            guest.get("/")
            answer = guest.post(path, {"language": "en", "next": next_}, follow_redirects=False)
            assert answer.headers["location"] == "/"

    def test_a_form_that_is_too_long_is_not_read(self, admin: Browser) -> None:
        assert admin.post("/do/pause-topic", {"name": "x" * (1 << 20)}).status_code == 413


class TestRoles:
    @pytest.mark.parametrize("who", ["viewer", "operator", "administrator"])
    def test_every_page_is_shown(self, setting: Setting, guest: Browser, who: str) -> None:
        guest.log_in(setting.tokens[who])
        guest.switch_actions_on()
        for path in PAGES:
            answer = guest.get(path)
            assert answer.status_code == (403 if "verify" in path and who != "administrator" else 200), path
            assert "<title>" in answer.text or path.endswith(".csv")

    def test_a_viewer_sees_no_button_and_is_refused_when_calling_anyway(self, setting: Setting, guest: Browser) -> None:
        guest.log_in(setting.tokens["viewer"])
        guest.switch_actions_on()
        for path in [*PAGES, f"/messages/{setting.ids['bad-0']}"]:
            found = re.findall(r'action="/do/([\w-]+)"', guest.get(path).text)
            assert set(found) <= {"rotate-operator-token"}, path
        answer = guest.post("/do/pause-topic", {"name": TOPIC, "reason": "x"})
        assert (answer.status_code, "ROLE_REQUIRED" in answer.text) == (403, True)
        assert not setting.is_paused()

    def test_an_operator_with_limits_sees_its_topics_only(self, setting: Setting, guest: Browser) -> None:
        guest.log_in(setting.tokens["limited"])
        for path in PAGES:
            answer = guest.get(path)
            assert answer.status_code in (200, 403), path
            assert "pay.done" not in answer.text, path
        answer = guest.get(f"/messages/{setting.ids['pay']}")
        assert (answer.status_code, "TOPIC_NOT_ALLOWED" in answer.text) == (403, True)

    def test_nothing_is_changed_before_actions_are_switched_on(self, setting: Setting, guest: Browser) -> None:
        page = guest.log_in(setting.tokens["administrator"])
        assert "/do/" not in page.text + guest.get("/topics").text
        answer = guest.post("/do/pause-topic", {"name": TOPIC, "reason": "x"})
        assert (answer.status_code, "Actions are disabled" in answer.text) == (403, True)
        assert not setting.is_paused()

    def test_a_body_is_shown_to_those_who_may_read_it_when_they_ask(self, setting: Setting, guest: Browser) -> None:
        page = f"/messages/{setting.ids['good-1']}"
        guest.log_in(setting.tokens["administrator"])
        assert "secret" not in guest.get(f"{page}?body=1").text
        guest.log_in(setting.register("body.reader", 1, reads_bodies=True))
        assert "secret" not in guest.get(page).text
        assert setting.audit(actor="body.reader") == []
        assert html.escape('{"secret": 1}', quote=True).replace("&quot;", "&#34;") in guest.get(f"{page}?body=1").text
        assert [row.action for row in setting.audit(actor="body.reader")] == ["read body"]


class TestActions:
    def test_a_topic_is_paused_and_resumed_and_the_audit_says_so(self, setting: Setting, admin: Browser) -> None:
        form = {"name": TOPIC, "reason": "stock is counted", "next": "/topics"}
        answer = admin.post("/do/pause-topic", form)
        assert (setting.is_paused(), "The topic was paused." in answer.text) == (True, True)
        assert "The topic was paused." not in admin.get("/topics").text  # said once
        admin.post("/do/resume-topic", form)
        assert not setting.is_paused()
        found = admin.get("/audit?action=pause+topic").text
        assert "stock is counted" in found
        assert "administrator" in found

    def test_a_missing_reason_and_a_wrong_number_are_explained(self, admin: Browser) -> None:
        answer = admin.post("/do/pause-topic", {"name": TOPIC})
        assert (answer.status_code, "reason must be 1 to" in answer.text) == (400, True)
        answer = admin.post("/do/update-topic", {"name": TOPIC, "open_limit": "many"})
        assert (answer.status_code, "open_limit must be a number" in answer.text) == (400, True)
        assert admin.post("/do/nothing", {}).status_code == 404

    def test_from_the_message_to_its_reactivation(self, setting: Setting, admin: Browser) -> None:
        page = admin.get("/search?q=bad-5").text
        assert "It was given up" in page
        assert "no stock for bad-5" in page
        form = {"message_id": setting.ids["bad-5"], "app": "coupons", "tag": "default", "reason": "stock is back"}
        admin.post("/do/reactivate", form)
        assert setting.state("bad-5") == types_pb2.CONSUMPTION_STATE_SCHEDULED
        assert "stock is back" in admin.get(f"/messages/{setting.ids['bad-5']}").text

    def test_subscribing_again_changes_no_policy(self, setting: Setting, admin: Browser) -> None:
        def policy() -> Any:
            request = admin_pb2.ListSubscriptionsRequest(topic=TOPIC)
            (found,) = setting.api("AdminService/ListSubscriptions", request).subscriptions
            return found.retry

        before = policy()
        form = {"topic": TOPIC, "app": "coupons", "tag": "", "update_mask.paths": "", "next": "/topics"}
        assert admin.post("/do/subscribe", form).status_code == 200
        assert policy() == before

    def test_a_new_key_is_shown_once(self, setting: Setting, admin: Browser) -> None:
        answer = admin.post("/do/register-app", {"id": "newcomer"})
        (key,) = re.findall(r'data-copy="([\w-]{43})"', answer.text)
        metadata = [("tmc-app", "newcomer"), ("authorization", f"Bearer {key}")]
        asked = consumption_pb2.DescribeSubscriptionsRequest()
        assert not isinstance(setting.api("ConsumptionService/DescribeSubscriptions", asked, metadata), tuple)
        assert key not in admin.get("/apps").text

    def test_a_bulk_job_takes_the_typed_count_and_a_stop_undoes_it(self, setting: Setting, admin: Browser) -> None:
        failed = setting.failed()
        page = admin.get("/bulk/new?action=2&topic=order.paid").text
        assert f'<strong id="count">{failed}</strong>' in page
        hidden = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page.split("/bulk/start")[1]))
        form = {**hidden, "reason": "sold out", "next": "/"}
        for wrong in ("", "x", str(failed + 1)):
            refused = admin.post("/bulk/start", {**form, "count": wrong})
            assert (refused.status_code, f"not that of the dry run, {failed}" in refused.text) == (400, True)
        started = admin.post("/bulk/start", {**form, "count": str(failed)})
        job = int(re.findall(r"/bulk/(\d+)/progress", started.text)[0])
        assert 'hx-trigger="every 1s"' in admin.get(f"/bulk/{job}/progress").text
        admin.post("/do/stop-bulk", {"job": job, "reason": "no"})
        stopped = admin.get(f"/bulk/{job}/progress").text
        assert ("hx-trigger" in stopped, "0 done" in stopped) == (False, True)
        assert setting.failed() == failed


class TestMistakes:
    """Of people and of strangers: none of them is a fault of the console."""

    @pytest.mark.parametrize(
        "path",
        [
            "/bulk/99999999999999999999999",
            "/bulk/99999999999999999999999/progress",
            "/search?state=99999999999",
            "/search?state=99",
            "/bulk/new?action=99999999999&topic=order.paid",
            "/messages/1-1-1-1",
            "/messages/%00",
            "/search?page=x",
            "/topics?topic=nothing",
            "/failures?topic=nothing",
            "/audit?message=x",
            "/search?q=a*",
        ],
    )
    def test_an_address_that_leads_nowhere(self, admin: Browser, path: str) -> None:
        answer = admin.get(path)
        assert 200 <= answer.status_code < 500
        assert path != "/search?q=a*" or ("topic must be given" in answer.text and 'name="topic"' in answer.text)

    @pytest.mark.parametrize(
        ("action", "form"),
        [
            ("silence", {"topic": TOPIC, "for_ms": "9" * 30, "reason": "x"}),
            ("register-operator", {"name": "a", "role": "99999999999", "reason": "x"}),
            ("stop-bulk", {"job": "-1", "reason": "x"}),
            ("decide", {"message_id": "x", "verdict": "x", "reason": "x"}),
        ],
    )
    def test_a_number_that_is_none(self, admin: Browser, action: str, form: dict[str, str]) -> None:
        assert 400 <= admin.post(f"/do/{action}", form).status_code < 500

    @pytest.mark.parametrize("token", ["é", "中", "a\r\nb", "\u202e", "\x00"])
    def test_a_token_that_cannot_be_one(self, guest: Browser, token: str) -> None:
        assert guest.post("/login", {"token": token}).status_code == 401

    def test_after_a_refused_form_one_is_led_back_to_its_page(self, setting: Setting, guest: Browser) -> None:
        guest.log_in(setting.tokens["administrator"])
        refused = guest.post("/do/pause-topic", {"name": TOPIC, "reason": "x", "next": "/topics"})
        assert re.findall(r'name="next" value="([^"]*)"', refused.text)[0] == "/topics"

    def test_a_part_of_a_page_leads_the_whole_page_to_the_login(self, guest: Browser) -> None:
        answer = guest.get("/bulk/1/progress", headers={"hx-request": "true"})
        assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/login?next=/bulk/1/progress")

    def test_logging_out_takes_a_form_of_this_console(self, setting: Setting, guest: Browser) -> None:
        guest.log_in(setting.tokens["viewer"])
        answer = guest.post("/logout", headers={"sec-fetch-site": "cross-site"}, follow_redirects=False)
        assert "set-cookie" not in answer.headers
        assert guest.get("/", follow_redirects=False).status_code == 200


def test_streams_of_events_are_limited(admin: Browser) -> None:
    admin.session.streams = MOST_OF_ONE
    assert admin.get("/events").status_code == 429


def test_many_wrong_logins_lock_out_no_right_one(setting: Setting) -> None:
    """The center answers wrong ones late."""
    wrong, right = ("/login", {"token": "wrong"}), ("/login", {"token": setting.tokens["viewer"], "next": "/"})
    with browser(setting.center) as made:
        answers = made.at_once([*[wrong] * 100, right])
        assert Counter(answers) == {401: 100, 303: 1}
        answers = made.at_once([wrong] * (LOGINS + 20))
        assert set(answers) == {401, 429}


def test_chinese(admin: Browser) -> None:
    page = admin.get("/", headers={"accept-language": "zh-CN,zh"}).text
    assert ('lang="zh"' in page, "概览" in page) == (True, True)
    admin.post("/preferences", {"language": "en", "next": "/"})
    assert 'lang="en"' in admin.get("/", headers={"accept-language": "zh-CN,zh"}).text


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "'--",
    "{{7*7}}",
    "${7*7}",
    "</td></table><form action=//evil.example>",
    "javascript:alert(1)",
    "%3Cscript%3E",
    "&lt;script&gt;",
    "<!--",
    "]]>",
    "\u202egnp.exe",
    "\u200b\u200bhidden",
    "\u2066isolated\u2069",
    "\ufeffbom",
    "a\u0301" * 40,
    "\U0001f600" * 40,
    "\u2028line\u2029separators",
    "../../etc/passwd",
    "..\\..\\",
    "' OR 1=1 --",
    '"; DROP TABLE tmc_app; --',
    "`id`",
    "$(reboot)",
    "=cmd|' /C calc'!A0",
    "+1+1",
    "-1+1",
    "@SUM(A1)",
    "\uff1d1",
    "%s%n%x",
    "\\x00",
    "\\u0000",
    "NULL",
    "undefined",
    "NaN",
    "[object Object]",
    "true",
    "0",
    "-0",
    "1e309",
    "\u0000".replace("\u0000", "zero"),
    "C:\\windows",
    "CON",
    "file:///etc/passwd",
    "data:text/html,<script>",
    "<base href=//evil.example>",
    "<meta http-equiv=refresh>",
    '<a href="//evil.example">',
    "style=display:none",
    "onmouseover=alert(1)",
    "\u0660\u0661",
    "\uff1cscript\uff1e",
    "İstanbul",
    "ß",
    "\u05d0\u05d1",
    "\u4f60\u597d",
    "<%= 7*7 %>",
    "#{7*7}",
    "*{7*7}",
    "@{7*7}",
    "x" * 128,
]


def test_hostile_texts_are_texts_everywhere(setting: Setting, admin: Browser) -> None:
    """As key, header, error of a check or a consumer, reason and contact; in pages, the CSV and at the command line."""
    assert len(HOSTILE) >= 60
    with setting.connect("orders") as orders:
        ids = [
            orders.publish(TOPIC, text.encode(), key=f"k{text}k"[:128], headers={"x-note": text}) for text in HOSTILE
        ]
    for number, (id_, text) in enumerate(zip(ids, HOSTILE, strict=True)):
        cancel = admin_pb2.CancelConsumptionRequest(message_id=id_, app="coupons", reason=text)
        setting.api("AdminService/CancelConsumption", cancel)
        app = admin_pb2.RegisterAppRequest(id=f"hostile-{number}", alert_email=text)
        setting.api("AdminService/RegisterApp", app)
    pages = [admin.get(f"/messages/{id_}").text for id_ in ids]
    pages += [admin.get(path).text for path in ("/search?topic=order.paid", "/audit", "/apps")]
    pages += [admin.get("/search", params={"q": f"k{text}k"[:128], "topic": TOPIC}).text for text in HOSTILE]
    for page in pages:
        assert not re.search(r"<(script(?! src=\"/static/)|img|svg onload|base|meta http-equiv|form action=//)", page)
        assert not re.search("[\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]", page)
        assert "49" not in re.findall(r"<h1[^>]*>([^<]*)</h1>", page)
    exported = admin.get("/audit.csv").text
    assert not re.search(r'(^|,)"?[=+\-@\uff1d\uff0b\uff0d\uff20]', exported, re.M)
    assert "'\uff1d1" in exported
    assert "'=cmd" in exported
    shown = setting.center.run_admin("list-messages", TOPIC, "--newest-first").stdout
    assert not re.search("[\x00-\x09\x0b-\x1f\u200b-\u200f\u2028-\u202e\u2066-\u2069]", shown)
