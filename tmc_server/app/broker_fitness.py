"""What `tmc doctor` says about RabbitMQ: settings of its administrators that make copies vanish, or stop queues.

AMQP does not tell of policies and limits; the broker's management API does (`rabbitmq.management`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from tmc_common.addresses import each_host, is_loopback
from tmc_common.amqp import Nodes, refused_login
from tmc_common.limited import UNCOMPRESSED, parsed, read_body
from tmc_common.submission import QUEUES
from tmc_server.delivery.rabbitmq_queues import DELIVERY_LIMIT
from tmc_server.domain.queue_names import PREFIX
from tmc_server.store.dialects.contract import Finding

_DEADLINE_S = 5.0
_PATIENCE = {"connection_attempts": 1, "socket_timeout": _DEADLINE_S, "blocked_connection_timeout": _DEADLINE_S}
_MOST_BYTES = 64 << 20  # of an answer: all queues of a virtual host
_HARMFUL: Mapping[str, str] = {
    "message-ttl": "copies that wait for longer vanish",
    "max-length": "copies beyond it vanish, unless overflow is reject-publish",
    "max-length-bytes": "copies beyond it vanish, unless overflow is reject-publish",
    "expires": "a queue without consumers vanishes with its copies",
    "consumer-timeout": "a handler that runs for longer loses its copy",
}
_LEAST = {"delivery-limit": DELIVERY_LIMIT, "consumer-timeout": 1_800_000}  # the second is RabbitMQ's own
_REJECTED_INSTEAD = ("max-length", "max-length-bytes")


def examine_broker(url: str, management: str) -> Sequence[Finding]:
    """url: of the broker.  management: http://user:password@host:15672; "": policies cannot be seen."""
    parts = urlsplit(each_host(url)[0])
    is_private = parts.scheme == "amqps" or is_loopback(f"{parts.hostname}:{parts.port or 5672}")
    scheme = "of this machine, without TLS" if parts.scheme == "amqp" else "with TLS"
    if not is_private:
        scheme = "without TLS: passwords and messages cross the network unencrypted"
    ours = [_login(url), Finding(setting="RabbitMQ, connection", value=scheme, must="", ok=True)]
    if not management:
        text = "not looked at: set rabbitmq.management"
        return [*ours, Finding(setting="RabbitMQ, policies", value=text, must="", ok=True)]
    host = parts.path.removeprefix("/") or quote("/", safe="")
    try:
        with httpx.Client(base_url=management, timeout=_DEADLINE_S, trust_env=False) as client:
            return [*ours, *_policies(client, host), *_limits(client, host)]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
        status = f" with status {exc.response.status_code}" if isinstance(exc, httpx.HTTPStatusError) else ""
        must = f"answer ({type(exc).__name__}{status})"  # not the error's text: it quotes the URL with the password
        return [*ours, Finding(setting="RabbitMQ, management API", value="", must=must, ok=False)]


def _login(url: str) -> Finding:
    """Log in to one node after the other, as servers do."""
    why = ""
    try:
        nodes = Nodes(url, **_PATIENCE).each
    except (OSError, ValueError) as exc:  # of a file that the URL names
        return Finding(
            setting="RabbitMQ, login",
            value="",
            must=f"be possible: a file that [rabbitmq] url names cannot be used ({type(exc).__name__})",
            ok=False,
        )
    for node in nodes:
        if not (why := refused_login(node)):
            return Finding(setting="RabbitMQ, login", value=f"{node.host}:{node.port}", must="", ok=True)
    return Finding(setting="RabbitMQ, login", value="", must=f"work ([rabbitmq] url). {why}", ok=False)


def _policies(client: httpx.Client, host: str) -> Iterator[Finding]:
    queues = [
        each for each in _get(client, f"/api/queues/{host}") if each["name"].startswith((f"{PREFIX}.", f"{QUEUES}."))
    ]
    found: dict[tuple[str, str, str], list[str]] = {}
    for queue in queues:
        policies = " and ".join(filter(None, (queue.get("policy"), queue.get("operator_policy"))))
        for key, value in _harmful(queue.get("effective_policy_definition") or {}):
            found.setdefault((policies, key, value), []).append(queue["name"])
    for (policies, key, value), names in sorted(found.items()):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        must = f"leave out {names[0]}{more}: {_HARMFUL.get(key, f'be at least {DELIVERY_LIMIT}')}"
        yield Finding(setting=f"RabbitMQ, policy {policies!r}", value=f"{key} = {value}", must=must, ok=False)
    if not found:
        seen = f"harmless for {len(queues)} queues" if queues else "not seen: there are no queues of this center yet"
        yield Finding(setting="RabbitMQ, policies", value=seen, must="", ok=True)


def _harmful(definition: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rejects = str(definition.get("overflow", "")).startswith("reject-publish")
    for key, value in definition.items():
        least = _LEAST.get(key)
        is_fine = least is not None and not (isinstance(value, int) and 0 <= value < least)
        if not is_fine and not (rejects and key in _REJECTED_INSTEAD) and (least is not None or key in _HARMFUL):
            yield key, str(value)


def _limits(client: httpx.Client, host: str) -> Iterator[Finding]:
    for limits in _get(client, f"/api/vhost-limits/{host}"):
        for name, value in sorted(limits["value"].items()):
            what = f"/api/queues/{host}" if name == "max-queues" else f"/api/vhosts/{host}/connections"
            used = len(_get(client, what))
            must = f"be -1, or leave room: {used} are in use"
            yield Finding(setting=f"RabbitMQ, limit {name}", value=str(value), must=must, ok=not 0 <= value <= used)


def _get(client: httpx.Client, path: str) -> list[dict[str, Any]]:
    with client.stream("GET", path, headers=UNCOMPRESSED) as answer:
        answer.raise_for_status()
        return list(parsed(read_body(answer, _MOST_BYTES, _DEADLINE_S)))
