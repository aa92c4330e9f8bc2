"""What the console is made of: words, files of others, sessions, guards."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import pytest
from starlette.requests import Request

import tmc_console
from tmc_common.admin_calls import SERVICE
from tmc_common.protocol import admin_pb2, types_pb2
from tmc_console.actions import ACTIONS
from tmc_console.chinese import CHINESE
from tmc_console.guards import is_ours, local_path
from tmc_console.sessions import IDLE_S, LONGEST_S, WRITING_S, Sessions
from tmc_console.words import preferred, printed, span, utc, words

HERE = Path(tmc_console.__file__).parent
TEMPLATES = "\n".join(path.read_text() for path in sorted((HERE / "templates").glob("*.html")))
VENDOR = {
    "htmx-2.0.4.min.js": "e209dda5c8235479f3166defc7750e1dbcd5a5c1808b7792fc2e6733768fb447",
    "uplot-1.6.32.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot-1.6.32.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def _texts() -> set[str]:
    """All that the templates translate, as far as it is written there."""
    found = set(re.findall(r'\b_\("([^"]+)"\)', TEMPLATES))
    found |= set(re.findall(r'\bact\("[\w-]+", "([^"]+)"', TEMPLATES))
    found |= set(re.findall(r'\("[\w_]+", "([^"]+)", "(?:text|number|role|checkbox)"\)', TEMPLATES))
    found |= set(re.findall(r'\("/\w*", "([^"]+)"\)', TEMPLATES))
    for enum, prefix in (
        (types_pb2.MessageState, "MESSAGE_STATE_"),
        (types_pb2.ConsumptionState, "CONSUMPTION_STATE_"),
        (admin_pb2.BulkAction, "BULK_ACTION_"),
        (admin_pb2.BulkState, "BULK_STATE_"),
        (admin_pb2.BulkOutcome, "BULK_OUTCOME_"),
    ):
        found |= {name.removeprefix(prefix) for name, _ in enum.items()} - {"UNSPECIFIED"}
    return found


def test_every_text_is_there_in_chinese() -> None:
    spoken = {action.done for action in ACTIONS.values()}
    assert sorted((_texts() | spoken) - set(CHINESE)) == []
    assert words("zh")("Overview") == "概览"
    assert words("zh")("no such text") == "no such text"
    assert words("en")("Overview") == "Overview"


def test_files_of_others_are_what_they_were_and_come_with_their_licenses() -> None:
    vendor = HERE / "static" / "vendor"
    found = {path.name: sha256(path.read_bytes()).hexdigest() for path in vendor.iterdir() if path.suffix != ".LICENSE"}
    assert found == VENDOR
    assert {path.name for path in vendor.glob("*.LICENSE")} == {"htmx.LICENSE", "uplot.LICENSE"}


def test_no_page_asks_another_host_or_runs_a_script_of_its_own() -> None:
    assert re.findall(r"https?://|<script(?! src=\"/static/)|\son\w+=|\sstyle=|javascript:", TEMPLATES) == []


def test_every_action_is_an_rpc() -> None:
    assert {action.method for action in ACTIONS.values()} <= set(SERVICE.methods_by_name)
    assert set(re.findall(r'\bact\("([\w-]+)"', TEMPLATES)) == set(ACTIONS)


@pytest.mark.parametrize(
    ("wanted", "path"),
    [
        ("/topics?topic=a", "/topics?topic=a"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example/", "/"),
        ("javascript:alert(1)", "/"),
        ("evil", "/"),
        ("", "/"),
        ("/a\r\nSet-Cookie: x=1", "/aSet-Cookie: x=1"),
        ("/\t/evil.example", "/"),
        ("/\n/evil.example", "/"),
    ],
)
def test_where_to_go_next_is_a_path_of_this_console(wanted: str, path: str) -> None:
    assert local_path(wanted) == path


@pytest.mark.parametrize(
    ("headers", "shown", "ours"),
    [
        ({}, "right", True),
        ({"origin": "http://console:1"}, "right", True),
        ({"origin": "http://evil.example"}, "right", False),
        ({"origin": "null"}, "right", False),
        ({}, "wrong", False),
        ({}, "", False),
        ({"sec-fetch-site": "cross-site"}, "right", False),
    ],
)
def test_a_form_is_ours_by_its_origin_and_its_token(headers: dict[str, str], shown: str, ours: bool) -> None:
    raw = [(name.encode(), value.encode()) for name, value in {"host": "console:1", **headers}.items()]
    assert is_ours(Request({"type": "http", "headers": raw}), shown, "right") is ours


class TestSessions:
    def test_they_end_when_nobody_uses_them_and_after_half_a_day(self) -> None:
        now = 0.0
        sessions = Sessions(lambda: now)
        cookie = sessions.begin("t", admin_pb2.Operator(name="ann"))
        now = IDLE_S - 1
        assert sessions.find(cookie) is not None
        now += IDLE_S
        assert sessions.find(cookie) is None
        cookie = sessions.begin("t", admin_pb2.Operator(name="ann"))
        began = now
        while now - began < LONGEST_S - IDLE_S / 2:
            now += IDLE_S / 2
            assert sessions.find(cookie) is not None
        now = began + LONGEST_S
        assert sessions.find(cookie) is None

    def test_a_page_that_asks_by_itself_keeps_none_alive(self) -> None:
        now = 0.0
        sessions = Sessions(lambda: now)
        cookie = sessions.begin("t", admin_pb2.Operator(name="ann"))
        while now < IDLE_S - 1:
            now += 60
            sessions.find(cookie, is_used=False)
        assert sessions.find(cookie) is None

    def test_streams_are_counted_by_operator_and_of_all(self) -> None:
        sessions = Sessions()
        for name, streams in (("ann", 2), ("ann", 3), ("bob", 4)):
            found = sessions.find(sessions.begin("token", admin_pb2.Operator(name=name)))
            assert found is not None
            found.streams = streams
        assert [sessions.streams("ann"), sessions.streams("bob"), sessions.streams()] == [5, 4, 9]

    def test_one_operator_throws_out_no_other(self) -> None:
        sessions = Sessions()
        ours = sessions.begin("t", admin_pb2.Operator(name="ann"))
        cookies = [sessions.begin("t", admin_pb2.Operator(name="vic")) for _ in range(1_100)]
        assert sessions.find(ours) is not None
        assert sum(sessions.find(cookie) is not None for cookie in cookies) == 20

    def test_actions_are_off_until_they_are_switched_on_and_after_a_while(self) -> None:
        now = 0.0
        sessions = Sessions(lambda: now)
        session = sessions.find(sessions.begin("t", admin_pb2.Operator(name="ann")))
        assert session is not None
        assert not sessions.may_write(session)
        sessions.switch_writing(session, on=True)
        assert sessions.may_write(session)
        now = WRITING_S
        assert not sessions.may_write(session)

    def test_each_has_a_cookie_and_a_form_token_of_its_own(self) -> None:
        sessions = Sessions()
        cookies = [sessions.begin("t", admin_pb2.Operator(name="ann")) for _ in range(10)]
        found = [sessions.find(cookie) for cookie in cookies]
        assert len({each.csrf for each in found if each is not None}) == 10
        sessions.end(cookies[0])
        assert sessions.find(cookies[0]) is None
        assert "t" not in cookies

    def test_there_are_not_endlessly_many(self) -> None:
        now = 0.0
        sessions = Sessions(lambda: now)
        first = sessions.begin("t", admin_pb2.Operator())
        for _ in range(1_000):
            now += 1
            sessions.begin("t", admin_pb2.Operator(name=str(now)))
        assert sessions.find(first) is None


def test_languages_times_and_bodies() -> None:
    assert [preferred(text) for text in ("zh-CN,zh;q=0.9", "de,en;q=0.5", "", "fr")] == ["zh", "en", "en", "en"]
    assert [span(ms) for ms in (0, 999, 1_000, 61_000, 7_200_000, 3 * 86_400_000)] == [
        "0 s",
        "0 s",
        "1 s",
        "1 min",
        "2 h",
        "3 d",
    ]
    assert (utc(0), utc(1_000), utc(1 << 62)) == ("", "1970-01-01 00:00:01.000 UTC", f"{1 << 62} ms")
    assert (printed(b"caf\xc3\xa9"), printed(b"\xff\x00")) == ("café", "ff 00")
    assert len(printed(b"x" * 1_000_000)) < 70_000
