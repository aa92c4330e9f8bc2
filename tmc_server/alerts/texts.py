"""Alerts as people read them, in English and Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from tmc_common.printable import escaped
from tmc_server.alerts.facts import Facts
from tmc_server.domain.alerts import OTHER_ERRORS, Language


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """subject: one line."""

    subject: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((self.subject, *self.lines))


_ENGLISH: Mapping[str, str] = {
    "raised": "[tmc] {kind}: {where}",
    "resolved": "[tmc] resolved: {kind}: {where}",
    "more": "{subject}, and {count} more",
    "also": "Also {where}: {alert}",
    "others": "... and {count} others: tmc admin list-alerts",
    "for": "{topic} for {subscriber} ({tag})",
    "detail": "Error: {detail}",
    "count": "{count} new, {total} since {since}; the last one at {last}.",
    "over": "{total} between {since} and {last}.",
    "messages": "Messages: {messages}",
    "owner": "Owner: {owner}",
    "look": "Look closer: tmc admin why {message}",
    "fingerprint": "Fingerprint of the error, for tmc admin bulk: {fingerprint}",
    "acknowledge": "No further reminders: tmc admin acknowledge-alert {alert} --reason ...",
}
_CHINESE: Mapping[str, str] = {
    "raised": "[tmc] {kind}：{where}",
    "resolved": "[tmc] 已关闭：{kind}：{where}",
    "more": "{subject}，另有 {count} 项",
    "also": "另有 {where}：{alert}",
    "others": "…… 及其他 {count} 项：tmc admin list-alerts",
    "for": "{topic} → {subscriber}（{tag}）",
    "detail": "错误：{detail}",
    "count": "新增 {count} 次，自 {since} 起共 {total} 次；最近一次：{last}。",
    "over": "{since} 至 {last} 共 {total} 次。",
    "messages": "消息：{messages}",
    "owner": "负责人：{owner}",
    "look": "查看原因：tmc admin why {message}",
    "fingerprint": "错误指纹（用于 tmc admin bulk）：{fingerprint}",
    "acknowledge": "停止提醒：tmc admin acknowledge-alert {alert} --reason ...",
}
_CHINESE_KINDS: Mapping[str, str] = {
    "delivery failed": "投递失败",
    "check failed": "回查失败",
    "handler hangs": "处理程序卡住",
    "producer not reached": "无法连接生产者",
    "contradiction": "提交与回滚相互矛盾",
    "forged copies": "伪造的消息副本",
    "no consumer": "没有消费者",
    "unacked near limit": "积压接近上限",
    "no forwarder": "没有转发器",
    "copies vanish": "消息副本丢失",
    "submission refused": "提交队列中的消息被拒绝",
    "queue missing": "队列缺失",
    "queue refuses": "队列拒绝消息",
    "queue differs": "队列参数不符",
}


_LISTED = 20  # of the notices that are sent together, in a text
_BULK_KINDS = ("delivery failed",)  # whose failures `tmc admin bulk` selects by their fingerprint


def text_of(facts: Facts, language: Language) -> Text:
    """Return what an alert says. Text of others is escaped: control characters cannot break lines or terminals."""
    words = _CHINESE if language == "zh" else _ENGLISH
    kind = str(facts["kind"])
    values = {name: escaped(str(value)) for name, value in facts.items()}
    where = _where(facts, words)
    times = {"since": _time(facts["since_ms"]), "last": _time(facts["last_ms"])}
    resolved = facts["event"] == "resolved"
    messages = facts["message_ids"]
    lines = [words["detail"].format(**values), words["over" if resolved else "count"].format(**{**values, **times})]
    if isinstance(messages, list) and messages:
        lines.append(words["messages"].format(messages=", ".join(messages)))
    owner = ", ".join(filter(None, (values["owner"], values["owner_email"], values["owner_phone"])))
    if owner:
        lines.append(words["owner"].format(owner=owner))
    if kind in _BULK_KINDS and facts["fingerprint"] not in ("", OTHER_ERRORS):
        lines.append(words["fingerprint"].format(**values))
    if not resolved and facts["message_id"]:
        lines.append(words["look"].format(message=values["message_id"]))
    if not resolved and facts["alert_id"]:
        lines.append(words["acknowledge"].format(alert=values["alert_id"]))
    named = _CHINESE_KINDS.get(kind, kind) if language == "zh" else kind
    subject = words["resolved" if resolved else "raised"].format(kind=escaped(named), where=where)
    also = facts["also"]
    if also:
        subject = words["more"].format(subject=subject, count=len(also))
        for each in also[:_LISTED]:
            lines.append(words["also"].format(where=_where(each, words), alert=escaped(str(each["alert_id"]))))
        if len(also) > _LISTED:
            lines.append(words["others"].format(count=len(also) - _LISTED))
    return Text(subject=subject, lines=tuple(lines))


def _where(facts: Facts, words: Mapping[str, str]) -> str:
    values = {name: escaped(str(facts[name])) for name in ("topic", "subscriber", "tag")}
    return words["for"].format(**values) if facts["subscriber"] else values["topic"]


def _time(ms: object) -> str:
    return datetime.fromtimestamp(int(str(ms)) / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
