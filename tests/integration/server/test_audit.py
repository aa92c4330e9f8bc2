"""`tmc admin list-audit`: what operators did, from the catalog and from the shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.center import RunningCenter


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder: Path = tmp_path_factory.mktemp("audit")
    with RunningCenter(f"sqlite:///{folder}/tmc.db") as made:
        yield made


def test_it_says_who_did_what_to_what_and_why(center: RunningCenter) -> None:
    rejected = center.rejected("audited")
    center.run_admin("pause-topic", "order.paid", "--reason", "stock is counted")
    center.run_admin("resume-topic", "order.paid", "--reason", "counted")
    center.run_admin("cancel", rejected, "coupons", "--reason", "ordered by mistake")

    def audit(*options: str) -> list[dict[str, str]]:
        return list(json.loads(center.run_admin("list-audit", "--json", *options).stdout).get("entries", []))

    first = audit()[0]
    assert (first["actor"], first["action"], first["reason"]) == ("admin", "cancel consumption", "ordered by mistake")
    assert [row["action"] for row in audit("--subject", "order.paid")][:2] == ["resume topic", "pause topic"]
    assert [row["reason"] for row in audit("--message", rejected)] == ["ordered by mistake"]
    assert audit("--actor", "nobody") == []
    assert [row["action"] for row in audit("--action", "pause topic", "--since", "1h")] == ["pause topic"]
    table = center.run_admin("list-audit", "--page-size", "1")
    assert table.stdout.split()[:7] == ["TIME", "OPERATOR", "FROM", "ACTION", "SUBJECT", "REASON", "CHANGE"]
    token = table.stderr.split()[-1]
    assert "resume topic" in center.run_admin("list-audit", "--page-size", "1", "--page-token", token).stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--message", "1-1-1-1", "--subject", "order.paid"], "subject must be left out: message_id names it"),
        (["--message", "7"], "message_id must be one that the center gave you"),
        (["--page-token", "x"], "page_token must be one that the center gave you"),
        (["--page-token", "1-2-3"], "page_token must be of this listing"),
        (["--subject", "x" * 301], "subject must have at most 300 characters"),
    ],
)
def test_what_cannot_be_answered_is_refused(center: RunningCenter, options: list[str], sentence: str) -> None:
    refused = center.run_admin("list-audit", *options)
    assert refused.returncode == 1
    assert sentence in refused.stderr
