"""Where checks may go: sixty and more hostile targets, and a listener that nobody may reach by them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tests.support.rogue import RogueHttp, TrapListener
from tmc_server.checks.addressing import MOST_TRIED, Addressing
from tmc_server.checks.asking import CheckDispatcher
from tmc_server.checks.channels import Channels
from tmc_server.checks.grpc import GrpcChecks
from tmc_server.checks.http import HttpChecks
from tmc_server.discovery.static import StaticInstances
from tmc_server.domain.catalog import App
from tmc_server.domain.checks import CheckAnswer, CheckReason, CheckTarget, Question, Verdict
from tmc_server.domain.egress import Egress, parse_place
from tmc_server.domain.ports.checks import Instance
from tmc_server.errors import CheckRefused

ORDERS = App(
    number=1,
    id="orders",
    service_name="orders",
    biz_id="orders",
    alert_email="",
    alert_phone="",
    key_hashes=(),
    check_token="TOKEN",
)
QUESTION = Question(
    message_id="1-1-05-1", topic="order.paid", key="k", biz_id="orders", attempt_id=b"", ledger_id=b"", created_ms=0
)

# PORT is the trap's. Every one of these means this machine, or a place where nobody should be sent.
LITERALS = [
    "127.0.0.1:PORT",
    "127.0.0.2:PORT",
    "127.255.255.254:PORT",
    "127.1:PORT",
    "127.0.1:PORT",
    "2130706433:PORT",
    "0x7f000001:PORT",
    "0x7f.1:PORT",
    "0x7f.0x0.0x0.0x1:PORT",
    "0177.0.0.1:PORT",
    "017700000001:PORT",
    "0:PORT",
    "0.0.0.0:PORT",
    "0x0:PORT",
    "127.0.0.1.:PORT",
    "[::1]:PORT",
    "[::]:PORT",
    "[0:0:0:0:0:0:0:1]:PORT",
    "[::ffff:127.0.0.1]:PORT",
    "[::ffff:7f00:1]:PORT",
    "[::127.0.0.1]:PORT",
    "[::ffff:0:127.0.0.1]:PORT",
    "[64:ff9b::7f00:1]:PORT",
    "[64:ff9b::127.0.0.1]:PORT",
    "[64:ff9b:1::7f00:1]:PORT",
    "[2002:7f00:1::]:PORT",
    "[2002:7f00:0001::1]:PORT",
    "[fe80::1]:PORT",
    "[fe80::1%25lo]:PORT",
    "[fe80::1%lo]:PORT",
    "[fec0::1]:PORT",
    "[ff02::1]:PORT",
    "169.254.169.254:80",
    "169.254.170.2:80",
    "[fd00:ec2::254%1]:80",
    "0xa9fea9fe:80",
    "2852039166:80",
    "224.0.0.1:PORT",
    "255.255.255.255:PORT",
    "240.0.0.1:PORT",
    "192.0.0.192:80",
    "198.18.0.1:PORT",
    "192.88.99.1:PORT",
    "::1:PORT",
    "localhost@127.0.0.1:PORT",
    "shop.internal:PORT@127.0.0.1:PORT",
    "127.0.0.1:PORT/shop.internal",
    "127.0.0.1:PORT#shop.internal:80",
    "127.0.0.1:PORT?x",
    "//127.0.0.1:PORT",
    "http://127.0.0.1:PORT",
    "file:///etc/passwd:1",
    "unix:/run/x:1",
    "127.0.0.1 :PORT",
    " 127.0.0.1:PORT",
    "127.0.0.1:PORT ",
    "127.0.0.1\n:PORT",
    "\uff11\uff12\uff17.0.0.1:PORT",
    "127\u30020\u30020\u30021:PORT",
    "127.0.0.1:0",
    "127.0.0.1:65536",
    "127.0.0.1:-1",
    "127.0.0.1:+80",
    "127.0.0.1:",
    ":PORT",
    "localhost:PORT",
    "LOCALHOST:PORT",
    "localhost.:PORT",
    "*:PORT",
    "shop_internal..:PORT",
    "[5f00::1]:PORT",
    "[3fff::1]:PORT",
    "[fd00::5efe:127.0.0.1]:PORT",
    "[fd00::200:5efe:7f00:1]:PORT",
]
# A name that the allow-list has, and what its owner's resolver says.
ANSWERS = [
    ["127.0.0.1"],
    ["127.8.8.8"],
    ["0.0.0.0"],
    ["::1"],
    ["::"],
    ["::ffff:127.0.0.1"],
    ["::127.0.0.1"],
    ["64:ff9b::7f00:1"],
    ["2002:7f00:1::"],
    ["169.254.169.254"],
    ["fe80::1%lo"],
    ["224.0.0.1"],
    ["ff02::1"],
    ["198.18.0.1"],
    ["240.0.0.1"],
    ["10.0.0.7", "127.0.0.1"],
    ["10.0.0.7", "::1"],
    [],
]


@pytest.fixture(scope="module")
def trap() -> Iterator[TrapListener]:
    made = TrapListener()
    yield made
    made.stop()


class Resolver:
    """Gives each answer in turn, the last one for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked = 0

    def __call__(self, _name: str, _port: int) -> Sequence[str]:
        self.asked += 1
        found = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if not found:
            raise OSError("no such name")
        return found


def kinds(
    allow: Sequence[str], resolver: Resolver, instances: Sequence[str] = (), trusted: bool = True
) -> CheckDispatcher:
    channels = Channels()
    addressing = Addressing(StaticInstances({"orders": instances}), Egress(allow), trusted, resolver)
    return CheckDispatcher({"grpc": GrpcChecks(channels), "http": HttpChecks()}, addressing)


def targets(address: str) -> list[CheckTarget]:
    return [
        CheckTarget(name="", kind="http", address=address, options={"path": "/verify"}, deadline_ms=300),
        CheckTarget(name="", kind="grpc", address=address, deadline_ms=300),
    ]


def test_there_are_sixty_of_them() -> None:
    assert len(LITERALS) + len(ANSWERS) >= 60


@pytest.mark.parametrize("text", LITERALS)
def test_hostile_addresses_reach_nobody(trap: TrapListener, text: str) -> None:
    """Named by a target, by static discovery, and by a sender; a name resolves to this machine."""
    address = text.replace("PORT", str(trap.port))
    own = Resolver(["127.0.0.1"])
    for asking in (
        kinds(["10.0.0.0/8:*", "shop.internal:*"], own),
        kinds([], own, [address]),
        kinds(["10.0.0.0/8:*"], own, [address], trusted=False),
    ):
        for target in [*targets(address), *targets("")]:
            [answer] = asking.ask(target, ORDERS, "default", [QUESTION], 5)
            assert answer.verdict is Verdict.UNKNOWN
            assert answer.reason in (CheckReason.REFUSED_TARGET, CheckReason.NO_INSTANCE), answer
        asking.close()
    assert trap.connections == 0


@pytest.mark.parametrize("found", ANSWERS)
def test_a_listed_name_that_leads_elsewhere_reaches_nobody(trap: TrapListener, found: list[str]) -> None:
    asking = kinds(["shop.internal:*"], Resolver(found), ["shop.internal:" + str(trap.port)])
    for target in [*targets(f"shop.internal:{trap.port}"), *targets("")]:
        [answer] = asking.ask(target, ORDERS, "default", [QUESTION], 5)
        assert answer.verdict is Verdict.UNKNOWN
        assert answer.reason in (CheckReason.REFUSED_TARGET, CheckReason.UNREACHABLE), answer
    asking.close()
    assert trap.connections == 0


def test_instances_are_tried_in_the_order_in_which_discovery_gives_them() -> None:
    """As far as sixteen: discovery knows who was seen last. Those that have the ledger come first, however many there are."""
    a, b = b"A" * 16, b"B" * 16

    class Seen:
        def instances(self, _app: App, _tag: str) -> Sequence[Instance]:
            unknown = [Instance(f"10.0.0.{number}:80") for number in range(20)]
            others = [Instance(f"10.0.1.{number}:80", b) for number in range(20)]
            return [*others, *unknown, Instance("10.0.2.1:80", a), Instance("10.0.2.2:80", a)]

    addressing = Addressing(Seen(), Egress(["10.0.0.0/8:*"]), False)
    found = addressing.endpoints(targets("")[0], ORDERS, "default", {a})
    assert isinstance(found, list)
    unknown = [f"10.0.0.{number}" for number in range(MOST_TRIED)]
    assert [endpoint.address for endpoint in found] == ["10.0.2.1", "10.0.2.2", *unknown]


def test_a_name_is_resolved_once_and_what_was_checked_is_what_is_connected_to() -> None:
    """Rebinding: the first answer is harmless, the second is this machine."""
    resolver = Resolver(["10.0.0.7"], ["127.0.0.1"])
    addressing = Addressing(StaticInstances({}), Egress(["shop.internal:80"]), True, resolver)
    [endpoint] = addressing.endpoints(CheckTarget(name="", kind="http", address="shop.internal:80"), ORDERS, "default")
    assert (endpoint.pinned, endpoint.authority, resolver.asked) == ("10.0.0.7:80", "shop.internal:80", 1)
    again = addressing.endpoints(CheckTarget(name="", kind="http", address="shop.internal:80"), ORDERS, "default")
    assert isinstance(again, CheckAnswer)
    assert again.reason is CheckReason.REFUSED_TARGET


@pytest.mark.parametrize("mode", ["redirect", "redirect_permanent"])
def test_redirects_reach_nobody(trap: TrapListener, mode: str) -> None:
    rogue = RogueHttp(trap.port)
    asking = kinds(["127.0.0.1/32:*"], Resolver([]))
    target = CheckTarget(name="", kind="http", address=rogue.address, options={"path": f"/{mode}"}, deadline_ms=10_000)
    [answer] = asking.ask(target, ORDERS, "default", [QUESTION], 30)
    assert (answer.verdict, answer.reason) == (Verdict.UNKNOWN, CheckReason.FAILED)
    assert rogue.asked == [f"GET /{mode}?bizID=orders&messageKey=k HTTP/1.1"]
    asking.close()
    rogue.stop()
    assert trap.connections == 0


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "grpc_proxy"])
def test_proxies_of_the_environment_are_not_used(
    trap: TrapListener, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, f"http://127.0.0.1:{trap.port}")
    rogue = RogueHttp()
    rogue.say("verify", b"2")
    asking = kinds(["127.0.0.1/32:*"], Resolver([]))
    http, grpc = targets(rogue.address)
    http = replace(http, deadline_ms=10_000)
    assert asking.ask(http, ORDERS, "default", [QUESTION], 30)[0].verdict is Verdict.COMMIT
    assert asking.ask(grpc, ORDERS, "default", [QUESTION], 5)[0].verdict is Verdict.UNKNOWN
    asking.close()
    rogue.stop()
    assert trap.connections == 0


class TestWhatIsAllowed:
    @pytest.mark.parametrize(
        ("allow", "address", "resolved", "permitted"),
        [
            ([], "shop.internal:80", "10.0.0.7", False),  # a target has to be listed
            (["shop.internal:80"], "shop.internal:80", "10.0.0.7", True),
            (["shop.internal:80"], "SHOP.internal:80", "10.0.0.7", True),
            (["shop.internal:80"], "shop.internal:81", "10.0.0.7", False),
            (["shop.internal:*"], "shop.internal:81", "10.0.0.7", True),
            (["shop.internal:80"], "shop.internal.evil.example:80", "10.0.0.7", False),
            (["10.0.0.0/8:8080"], "10.1.2.3:8080", "", True),
            (["10.0.0.0/8:8080"], "10.1.2.3:80", "", False),
            (["10.0.0.0/8:8080"], "any.name:8080", "10.9.9.9", True),
            (["127.0.0.1/32:50061"], "127.0.0.1:50061", "", True),
            (["127.0.0.1/32:50061"], "127.0.0.2:50061", "", False),
            (["127.0.0.1/32:*", "shop.internal:80"], "shop.internal:80", "127.0.0.1", True),
            (["fd00::/8:443"], "[fd00::7]:443", "", True),
        ],
    )
    def test_targets(self, allow: list[str], address: str, resolved: str, permitted: bool) -> None:
        addressing = Addressing(StaticInstances({}), Egress(allow), True, Resolver([resolved] if resolved else []))
        found = addressing.endpoints(CheckTarget(name="", kind="http", address=address), ORDERS, "default")
        assert isinstance(found, list) is permitted, found

    def test_instances_of_discovery_need_no_entry_and_those_of_senders_do(self) -> None:
        for trusted, permitted in ((True, True), (False, False)):
            addressing = Addressing(StaticInstances({"orders": ["10.0.0.7:1"]}), Egress([]), trusted, Resolver([]))
            found = addressing.endpoints(CheckTarget(name="", kind="grpc"), ORDERS, "default")
            assert isinstance(found, list) is permitted

    def test_a_refused_target_is_refused_when_it_is_set(self) -> None:
        asking = kinds([], Resolver(["127.0.0.1"]))
        for untried in (True, False):
            with pytest.raises(CheckRefused, match=r"\[checks\] allow does not list it"):
                asking.examine(targets("10.0.0.7:80")[0], ORDERS, "default", untried)
        with pytest.raises(CheckRefused, match="no kind 'ftp'"):
            asking.examine(CheckTarget(name="", kind="ftp"), ORDERS, "default", untried=True)
        with pytest.raises(CheckRefused, match="Start it first"):
            asking.examine(CheckTarget(name="", kind="grpc"), ORDERS, "default", untried=False)
        asking.examine(CheckTarget(name="", kind="grpc"), ORDERS, "default", untried=True)
        asking.close()

    @pytest.mark.parametrize(
        "entry", ["", "host", "host:", "host:0", "host:70000", "10.0.0.0/33:80", "a b:80", "10.0.0.1/8:80"]
    )
    def test_entries_that_cannot_be_read(self, entry: str) -> None:
        with pytest.raises(ValueError, match=r".+"):
            Egress([entry])

    def test_places_are_written_one_way(self) -> None:
        assert str(parse_place("[FD00:0::7]:443")) == "[fd00::7]:443"
        assert str(parse_place("Shop.Internal.:80")) == "shop.internal:80"
