"""What chat tools expect by POST. Sources: their documentation of incoming webhooks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tmc_server.alerts.facts import Facts
from tmc_server.alerts.texts import Text
from tmc_server.domain.alerts import WebhookFormat

_LONGEST = 2_000  # bytes of UTF-8; the least that all of them take
_MARKDOWN = re.compile(r"([\\`*_~|\[\]()<>#])")

_BODIES: Mapping[str, Callable[[str], Mapping[str, Any]]] = {
    "slack": lambda text: {"text": _plain(text)},
    "discord": lambda text: {"content": _as_it_is(text), "allowed_mentions": {"parse": []}},
    "dingtalk": lambda text: {"msgtype": "text", "text": {"content": text}},
    "wecom": lambda text: {"msgtype": "text", "text": {"content": text.replace("<@", "< @")}},
    "feishu": lambda text: {"msg_type": "text", "content": {"text": _plain(text)}},
    "teams": lambda text: {
        "type": "message",
        "attachments": [
            {
                "contentType": "application/vnd.microsoft.card.adaptive",
                "content": {
                    "type": "AdaptiveCard",
                    "version": "1.4",
                    "body": [{"type": "TextBlock", "text": _as_it_is(line), "wrap": True} for line in text.split("\n")],
                },
            }
        ],
    },
}
# Those of China answer 200 whatever happened; this field says it, 0: taken.
ERROR_FIELD: Mapping[str, str] = {"dingtalk": "errcode", "wecom": "errcode", "feishu": "code"}


def body_of(kind: WebhookFormat, facts: Facts, text: Text) -> Mapping[str, Any]:
    """kind json: the facts."""
    return facts if kind == "json" else _BODIES[kind](str(text).encode()[:_LONGEST].decode(errors="ignore"))


def _plain(text: str) -> str:
    """Slack and Feishu read tags and mentions between angle brackets."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _as_it_is(text: str) -> str:
    """Discord and Teams read Markdown, and links in it."""
    return _MARKDOWN.sub(r"\\\1", text)
