"""What strangers write, on a terminal and in a log."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata
from collections.abc import Callable

import pytest

from tmc_common.printable import escaped, without_secrets
from tmc_server.config import LogConfig
from tmc_server.telemetry import configure_logging

_ESC, _CSI = "\x1b", "\x9b"
HOSTILE = [
    # terminal: titles, colors, cursor, clipboard, links, reports, resets, other C0 controls
    f"{_ESC}]0;owned\x07",
    f"{_ESC}[2J",
    f"{_ESC}[1;31mred{_ESC}[0m",
    f"{_ESC}[1A{_ESC}[2K",
    f"{_ESC}]52;c;cm0=\x07",
    f"{_ESC}]8;;http://evil{_ESC}\\link",
    f"{_ESC}[6n",
    f"{_ESC}c",
    f"{_ESC}(0",
    f"{_ESC}P+q{_ESC}\\",
    f"{_ESC}_G{_ESC}\\",
    f"{_ESC}[?1049h",
    f"{_ESC}[20;1t",
    f"{_CSI}31m",
    "\x9d0;t\x9c",
    "\x90q\x9c",
    "\x84",
    "\x85",
    "\x80",
    "\x9f",
    "\x00",
    "\x01",
    "\x07",
    "\x08\x08\x08",
    "\x0b",
    "\x0c",
    "\x0e",
    "\x0f",
    "\x11",
    "\x1a",
    "\x7f",
    "a\rb",
    "a\nb",
    "a\r\nb",
    "\t",
    # texts that show one thing and mean another
    "\u202eexe.gpj",
    "\u202dx",
    "\u202a",
    "\u202b",
    "\u202c",
    "\u2066x\u2069",
    "\u2067",
    "\u2068",
    "\u200e",
    "\u200f",
    "\u061c",
    # nothing to see
    "a\u200bb",
    "a\u200cb",
    "a\u200db",
    "a\u2060b",
    "\ufeffx",
    "a\u00adb",
    "\u180e",
    "\U000e0041\U000e007f",
    "\U000e0001",
    # line breaks that are none, half characters, characters of nobody
    "a\u2028b",
    "a\u2029b",
    "\ud800",
    "\udfff",
    "\udc9b",
    "\ue000",
    "\ufff9x\ufffb",
    "\U000f0000",
    "\uffff",
    "\U0010ffff",
]
READABLE = [
    "order.paid",
    "订单\u3000已支付",
    "Größe 5 µm",
    "שלום",
    "مرحبا",
    "हिन्दी",
    "日本語",
    "emoji 🎉",
    "a b",
    "\\u001b",
    "",
]


def _is_harmless(text: str) -> bool:
    return all(unicodedata.category(each)[0] != "C" and unicodedata.category(each) not in ("Zl", "Zp") for each in text)


def test_the_table_is_long_and_hostile() -> None:
    assert len(HOSTILE) >= 60
    assert not any(_is_harmless(text) for text in HOSTILE)


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_nothing_that_a_terminal_obeys_is_left_and_nothing_is_lost(text: str) -> None:
    shown = escaped(text)
    assert _is_harmless(shown)
    assert "\\" in text or json.loads(f'"{shown}"') == text


@pytest.mark.parametrize("text", READABLE)
def test_every_script_stays_readable(text: str) -> None:
    assert escaped(text) == text


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_an_answer_as_json_is_harmless_and_says_the_same(text: str) -> None:
    shown = escaped(json.dumps({"key": text, "name": "订单"}, indent=2, ensure_ascii=False), keep="\n")
    assert _is_harmless(shown.replace("\n", ""))
    assert "订单" in shown
    assert json.loads(shown) == {"key": text, "name": "订单"}


def logged(monkeypatch: pytest.MonkeyPatch, form: str, say: Callable[[], None]) -> str:
    """What a server writes to standard error while `say` runs."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    root, ours = logging.getLogger(), logging.getLogger("tmc")
    before = root.handlers[:], root.level, ours.level
    try:
        configure_logging(LogConfig.model_validate({"format": form}))
        say()
    finally:
        root.handlers[:], root.level = before[0], before[1]
        ours.setLevel(before[2])
    return stream.getvalue()


def _say(text: str) -> None:
    log = logging.getLogger("tmc.test")
    log.warning("delivery failed: %s", text)
    try:
        password = "marked-local-variable"
        assert password
        raise ValueError(text)
    except ValueError:
        log.exception("failed: %s", text)


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_log_has_one_line_per_event_and_indented_stacks(
    monkeypatch: pytest.MonkeyPatch, text: str, form: str
) -> None:
    forged = f"{text}\n2026-11-22T00:00:00Z [critical] FORGED"
    lines = logged(monkeypatch, form, lambda: _say(forged)).split("\n")
    lines = [line for line in lines if line]
    assert not [line for line in lines if line.startswith("2026-11-22T00:00:00Z [critical]")]
    assert len([line for line in lines if not line.startswith("    ")]) == 2
    assert _is_harmless("".join(lines))
    assert "marked-local-variable" not in "".join(lines)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Max retries: amqp://center:hunter2@rabbit:5672/%2F", "Max retries: amqp://center:***@rabbit:5672/%2F"),
        ("amqp://center:hun/ter@2@rabbit:5672/%2F", "amqp://center:***@rabbit:5672/%2F"),
        ("consul://h:1/s?tag=t&token=hunter2", "consul://h:1/s?tag=t&token=***"),
        ("http://host/path", "http://host/path"),
        ("a=b", "a=b"),
    ],
)
def test_passwords_in_addresses_are_masked(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
