"""Producers over HTTP and a webhook, while servers die and the webhook is away: each decision counts once, and arrives."""

from __future__ import annotations

import base64
import hashlib
import itertools
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster
from tests.support.dose import LONG, in_turn
from tests.support.receiver import Receiver, Reply, receiver
from tmc_common.protocol import types_pb2
from tmc_storm.eventually import eventually

pytestmark = [pytest.mark.services, pytest.mark.timeout(1200 if LONG else 300)]
_MESSAGES = 20_000 if LONG else 1_000
_CALLERS = 8
_TURNS = 10 if LONG else 4  # a kill and a stop in turn


class _Client:
    """One caller: the same request again, at the other server, until it is answered."""

    def __init__(self, cluster: Cluster) -> None:
        self._urls = itertools.cycle([server.url for server in cluster.servers])
        self._client = httpx.Client(
            headers={"tmc-app": "orders", "authorization": f"Bearer {cluster.keys['orders']}"}, timeout=30
        )
        self.repeated = 0

    def close(self) -> None:
        self._client.close()

    def ask(self, call: str, **given: object) -> Any:
        while True:
            try:
                answer = self._client.post(f"{next(self._urls)}/v1/messages:{call}", json=given)
            except httpx.TransportError:
                self.repeated += 1
                time.sleep(0.05)
                continue
            if answer.status_code == 200:
                return answer.json()
            assert answer.status_code in (409, 429, 503), answer.text
            assert answer.json()["code"] in ("ABORTED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"), answer.text
            self.repeated += 1
            time.sleep(answer.json().get("retryAfterMs", 50) / 1000)


def _is_rolled_back(number: int) -> bool:
    return number % 5 == 4


def _produce(client: _Client, number: int) -> None:
    attempt = base64.b64encode(hashlib.sha256(b"%d" % number).digest()[:16]).decode()
    prepared = client.ask("prepare", topic="order.paid", key=f"m{number}", body="e30=", attemptId=attempt)
    call, state = ("rollback", "ROLLED_BACK") if _is_rolled_back(number) else ("submit", "COMMITTED")
    assert client.ask(call, messageId=prepared["messageId"])["state"] == f"MESSAGE_STATE_{state}"


def _disturb(cluster: Cluster, shop: Receiver, done: Counter[str]) -> None:
    part = _MESSAGES // (_TURNS + 1)
    chance = random.Random(1)
    shop.answer = lambda _: Reply(503 if chance.random() < 0.02 else 204)
    for turn in range(_TURNS):
        eventually(lambda most=(turn + 1) * part: done["produced"] >= most, seconds=600)
        server = cluster.servers[turn // 2 % 2]
        if turn % 2:
            server.terminate()
        else:
            server.kill()
        server.start()


@pytest.mark.takes_turns("killed servers")
@pytest.mark.parametrize("kind", in_turn("webhooks", ["webhook", "webhook-batch"]))
def test_each_decision_counts_once_and_arrives(kind: str) -> None:
    with ExitStack() as stack:
        shop = stack.enter_context(receiver())
        cluster = stack.enter_context(Cluster(servers=2, http=True, TMC_WEBHOOKS__ALLOW='["127.0.0.0/8:*"]'))
        cluster.register("orders", "coupons")
        forward = types_pb2.Forward(kind=kind, target=shop.url)
        policy = types_pb2.RetryPolicy(interval_ms=1000, max_retry=0)  # nothing may fail
        cluster.in_effect(
            cluster.subscribe(
                "order.paid",
                "coupons",
                forward=forward,
                retry=policy,
                topic_settings={"transaction_time_ms": 120_000},  # nobody answers checks here
            )
        )
        done: Counter[str] = Counter()
        clients = [stack.enter_context(closing(_Client(cluster))) for _ in range(_CALLERS)]
        disturbing = threading.Thread(target=_disturb, args=(cluster, shop, done))
        disturbing.start()

        def caller(number: int) -> None:
            for each in range(number, _MESSAGES, _CALLERS):
                _produce(clients[number], each)
                done["produced"] += 1

        with ThreadPoolExecutor(_CALLERS) as pool:
            list(pool.map(caller, range(_CALLERS)))
        disturbing.join()
        rolled_back = sum(map(_is_rolled_back, range(_MESSAGES)))
        eventually(lambda: cluster.consumptions() == {"ACKED": _MESSAGES - rolled_back}, describe=cluster.consumptions)
        assert cluster.messages() == {"COMMITTED": _MESSAGES - rolled_back, "ROLLED_BACK": rolled_back}
        assert set(shop.keys) == {f"m{number}" for number in range(_MESSAGES) if not _is_rolled_back(number)}
        assert sum(client.repeated for client in clients) > 0
        twice = len(shop.keys) - len(set(shop.keys))
        print(f"{kind}: {_MESSAGES} messages, {_TURNS} kills and stops, {twice} copies came again")
