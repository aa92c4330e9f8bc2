"""What every sink of alerts promises: an alert of any kind is taken, and a sink that cannot take one says so."""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from email import message_from_bytes, policy
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import Envelope

from tests.support.outlet import SomeCatalog
from tmc_server.alerts.log import LogSink
from tmc_server.alerts.smtp import MailServer, SmtpSink
from tmc_server.alerts.webhook import WebhookSink
from tmc_server.domain.alerts import Language, NoticeEvent
from tmc_server.domain.ports.alerts import Alert, AlertSink
from tmc_storm.services.ports import free_port

_PLAIN = SomeCatalog("coupons", 1).current
_OWNER = replace(_PLAIN.apps[1], alert_email="orders@example.org", alert_phone="+49 30 1234567")
CATALOG = replace(_PLAIN, apps={**_PLAIN.apps, 1: _OWNER})
HOSTILE = "</script>\n\x1b[31m\u202eolleh {0} %s"


def an_alert(**changes: object) -> Alert:
    values = {
        "id": 1,
        "kind": "delivery failed",
        "topic": 1,
        "shard": 5,
        "number": 77,
        "subscription": 1,
        "attempt": 3,
        "detail": "given up",
        "created_ms": 1_800_000_000_000,
    }
    return Alert(**(values | changes))


class SinkContract(ABC):
    @abstractmethod
    def sink(self) -> AlertSink:
        """A new one."""

    @abstractmethod
    def taken(self) -> list[str]:
        """What arrived behind it, as text."""

    def test_an_alert_arrives_with_its_message_topic_and_subscriber(self) -> None:
        self.sink().send(an_alert(), CATALOG)
        (text,) = self.taken()
        for part in ("delivery failed", "1-1-05-77", "t1", "coupons", "given up"):
            assert part in text

    def test_a_notice_of_many_says_how_many(self) -> None:
        first = 1_800_000_000_000
        self.sink().send(an_alert(count=17, first_ms=first, last_ms=first + 5000, samples=((5, 77),)), CATALOG)
        assert "17" in self.taken()[0]

    @pytest.mark.parametrize(
        "changes", [{"number": 0, "shard": 0}, {"subscription": 0}, {"topic": 0, "subscription": 0}, {"topic": 999}]
    )
    def test_what_the_catalog_does_not_know_is_no_failure(self, changes: dict[str, int]) -> None:
        self.sink().send(an_alert(**changes), CATALOG)
        assert len(self.taken()) == 1

    def test_notices_that_are_sent_together_are_all_named(self) -> None:
        """The log has a line for each; whoever acknowledges needs the ids."""
        alike = [an_alert(episode=f"0-{number}", detail=f"detail {number}") for number in (18, 19)]
        self.sink().send(an_alert(episode="0-17", alike=alike), CATALOG)
        text = "\n".join(self.taken())
        for number in (18, 19):
            assert f"0-{number}" in text or f"detail {number}" in text

    def test_hostile_text_is_text(self) -> None:
        self.sink().send(an_alert(detail=HOSTILE), CATALOG)
        assert len(self.taken()) == 1


class TestLog(SinkContract):
    @pytest.fixture(autouse=True)
    def records(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        self.caplog = caplog

    def sink(self) -> AlertSink:
        return LogSink()

    def taken(self) -> list[str]:
        return [record.getMessage() for record in self.caplog.records if record.name == "tmc.alert"]

    def test_what_is_over_is_no_warning(self) -> None:
        self.caplog.set_level("INFO", "tmc.alert")
        for event in (NoticeEvent.RAISED, NoticeEvent.RESOLVED):
            self.sink().send(an_alert(event=event), CATALOG)
        assert [record.levelname for record in self.caplog.records if record.name == "tmc.alert"] == ["WARNING", "INFO"]


class Receiving(SinkContract):
    """Behind an HTTP server that answers `says`."""

    says = b""

    @pytest.fixture(autouse=True)
    def receiver(self) -> Iterator[None]:
        bodies: list[bytes] = []

        def says() -> bytes:
            return self.says

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", str(len(says())))
                self.end_headers()
                self.wfile.write(says())

            def log_message(self, *_: object) -> None: ...

        self.bodies = bodies
        server = HTTPServer(("127.0.0.1", 0), Receiver)
        self.url = f"http://127.0.0.1:{server.server_port}/alerts"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield
        server.shutdown()
        thread.join()
        server.server_close()


class Chat(Receiving):
    """active: what it would not show as it is."""

    active: tuple[str, ...] = ()

    def test_nobody_is_mentioned_and_nothing_is_a_link(self) -> None:
        self.sink().send(an_alert(detail="<!channel> <@all> [fix it](https://evil.example)"), CATALOG)
        (text,) = self.taken()
        assert not [form for form in self.active if form in text]

    def test_a_long_error_is_cut_where_a_character_ends(self) -> None:
        self.sink().send(an_alert(detail="错" * 500, samples=((5, 77),) * 60), CATALOG)
        (text,) = self.taken()
        assert len(text.encode()) <= 2_600  # escapes make it longer


class TestWebhook(Receiving):
    def sink(self) -> AlertSink:
        return WebhookSink(self.url)

    def taken(self) -> list[str]:
        return [json.dumps(json.loads(body), ensure_ascii=False) for body in self.bodies]

    def test_one_that_cannot_take_it_says_so(self) -> None:
        with pytest.raises(OSError, match="cannot be reached"):
            WebhookSink(f"http://127.0.0.1:{free_port()}/").send(an_alert(), CATALOG)

    def test_a_resolved_alert_says_so(self) -> None:
        self.sink().send(an_alert(event=NoticeEvent.RESOLVED, episode="0-17", total=9), CATALOG)
        (values,) = map(json.loads, self.taken())
        assert (values["event"], values["alert_id"], values["total"]) == ("resolved", "0-17", 9)


class TestSlack(Chat):
    active = ("<",)

    def sink(self) -> AlertSink:
        return WebhookSink(self.url, "slack")

    def taken(self) -> list[str]:
        return [json.loads(body)["text"] for body in self.bodies]


class TestDiscord(Chat):
    active = ("](",)

    def sink(self) -> AlertSink:
        return WebhookSink(self.url, "discord")

    def taken(self) -> list[str]:
        bodies = [json.loads(body) for body in self.bodies]
        assert all(body["allowed_mentions"] == {"parse": []} for body in bodies)
        return [body["content"] for body in bodies]


class TestTeams(Chat):
    active = ("](",)

    def sink(self) -> AlertSink:
        return WebhookSink(self.url, "teams")

    def taken(self) -> list[str]:
        cards = [json.loads(body)["attachments"][0]["content"] for body in self.bodies]
        return ["\n".join(block["text"] for block in card["body"]) for card in cards]


class Judging(Chat):
    """Tools that answer 200 whatever happened."""

    refusal = b""

    def test_a_refusal_in_the_answer_is_one(self) -> None:
        for said in (self.refusal, b"", b"[]", b"<html>"):
            self.says = said
            with pytest.raises(OSError, match="does not take the alert"):
                self.sink().send(an_alert(), CATALOG)


class TestDingTalk(Judging):
    says, refusal = b'{"errcode":0}', b'{"errcode":310000,"errmsg":"keywords not in content"}'

    def sink(self) -> AlertSink:
        return WebhookSink(self.url, "dingtalk")

    def taken(self) -> list[str]:
        return [json.loads(body)["text"]["content"] for body in self.bodies]


class TestWeCom(Judging):
    active = ("<@",)
    says, refusal = b'{"errcode":0}', b'{"errcode":93000}'

    def sink(self) -> AlertSink:
        return WebhookSink(self.url, "wecom")

    def taken(self) -> list[str]:
        return [json.loads(body)["text"]["content"] for body in self.bodies]


class TestFeishu(Judging):
    active = ("<",)
    says, refusal = b'{"code":0}', b'{"code":19001}'

    def sink(self) -> AlertSink:
        return WebhookSink(self.url, "feishu")

    def taken(self) -> list[str]:
        return [json.loads(body)["content"]["text"] for body in self.bodies]


class _MailBox:
    """A mail server's handler. refuses: recipients, by what it answers."""

    def __init__(self) -> None:
        self.got: list[Envelope] = []
        self.refuses: dict[str, str] = {}

    async def handle_RCPT(self, _server: Any, _session: Any, envelope: Envelope, address: str, _options: Any) -> str:
        if address in self.refuses:
            return self.refuses[address]
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Envelope) -> str:
        self.got.append(envelope)
        return "250 OK"


class TestSmtp(SinkContract):
    @pytest.fixture(autouse=True)
    def server(self) -> Iterator[None]:
        self.box = _MailBox()
        self.port = free_port()
        controller = Controller(self.box, hostname="127.0.0.1", port=self.port)
        controller.start()
        yield
        controller.stop()

    def sink(self, language: Language = "en", to: tuple[str, ...] = ("ops@example.org",)) -> AlertSink:
        server = MailServer(host="127.0.0.1", port=self.port, security="none")
        return SmtpSink(server, "tmc@example.org", to, to_owner=True, language=language)

    def taken(self) -> list[str]:
        mails = [message_from_bytes(bytes(each.content or b""), policy=policy.default) for each in self.box.got]
        return [f"{mail['subject']}\n{mail.get_content()}" for mail in mails]

    def test_the_owner_gets_it_and_their_phone_number_is_in_it(self) -> None:
        self.sink().send(an_alert(), CATALOG)
        assert self.box.got[0].rcpt_tos == ["ops@example.org", "orders@example.org"]
        assert "+49 30 1234567" in self.taken()[0]

    def test_chinese(self) -> None:
        self.sink("zh").send(an_alert(), CATALOG)
        self.sink("zh").send(an_alert(event=NoticeEvent.RESOLVED), CATALOG)
        raised, resolved = self.taken()
        assert "投递失败" in raised
        assert "已关闭" in resolved

    def test_a_line_break_in_an_error_makes_no_header(self) -> None:
        self.sink().send(an_alert(kind="x\nBcc: thief@example.org", detail="\r\nBcc: thief@example.org"), CATALOG)
        (envelope,) = self.box.got
        assert "thief@example.org" not in envelope.rcpt_tos
        assert message_from_bytes(bytes(envelope.content or b""))["bcc"] is None

    def test_one_refused_recipient_does_not_stop_the_others(self, caplog: pytest.LogCaptureFixture) -> None:
        self.box.refuses = {"ops@example.org": "550 no such user"}
        self.sink().send(an_alert(), CATALOG)
        assert self.box.got[0].rcpt_tos == ["orders@example.org"]
        assert "refuses ops@example.org" in caplog.text

    def test_refused_for_good_by_all_it_is_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        self.box.refuses = dict.fromkeys(("ops@example.org", "orders@example.org"), "550 no such user")
        self.sink().send(an_alert(), CATALOG)
        assert caplog.text.count("does not reach this address") == 2

    def test_refused_for_now_it_is_sent_again(self) -> None:
        for refused in (["ops@example.org"], ["ops@example.org", "orders@example.org"]):
            self.box.refuses = dict.fromkeys(refused, "451 try again later")
            with pytest.raises(OSError, match="try again"):
                self.sink().send(an_alert(), CATALOG)

    def test_an_address_that_not_every_server_takes_holds_up_no_other(self, caplog: pytest.LogCaptureFixture) -> None:
        self.sink(to=("jürgen@example.org", "ops@example.org")).send(an_alert(), CATALOG)
        assert self.box.got[0].rcpt_tos == ["ops@example.org", "orders@example.org"]
        assert "does not reach it" in caplog.text

    def test_a_server_that_is_away_or_speaks_no_tls_takes_nothing(self) -> None:
        away = MailServer(host="127.0.0.1", port=free_port())
        plain = MailServer(host="127.0.0.1", port=self.port)
        for server in (away, plain):
            with pytest.raises(OSError, match=r".+"):
                SmtpSink(server, "tmc@example.org", ["ops@example.org"], to_owner=False).send(an_alert(), CATALOG)
        assert self.box.got == []

    def test_without_a_recipient_nothing_is_sent(self, caplog: pytest.LogCaptureFixture) -> None:
        self.sink(to=()).send(an_alert(topic=999), CATALOG)
        assert self.box.got == []
        assert "no recipient is configured" in caplog.text
