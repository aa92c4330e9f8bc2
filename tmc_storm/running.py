"""One run: set the scene, trade, strike, settle, judge."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import grpc

from tmc_storm.cast import Cast
from tmc_storm.eventually import eventually
from tmc_storm.faults import faults_of, nodes_of
from tmc_storm.judging import Books, Finding, Relation, is_settled, judge, relations
from tmc_storm.observing import Observer, Progress, Sample, Usage
from tmc_storm.plan import Fault, Strike, literal_plan, random_plan, survey_plan
from tmc_storm.scene import Scene
from tmc_storm.services.ports import free_port
from tmc_storm.services.program import Supervisor
from tmc_storm.shop import books
from tmc_storm.visit import Host, Visit
from tmc_storm.weather import StormBroken, Struck, Weather
from tmc_storm.world import Form, World

_FIRST_EFFECTS = 20  # before the storm begins: everything works
_LATE_COPIES_S = 3.0
_AWAY_S = 5.0  # what the literal form has killed
_CALM_S = 5.0  # around each fault of a survey
_LOOK_S = 0.5


class Kind(Enum):
    """Kinds of storms. LITERAL: 1 to all nodes are killed at once.  SURVEY: each kind of fault once, alone."""

    RANDOM = "random"
    LITERAL = "literal"
    SURVEY = "survey"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a run. host: a center that runs already, instead of one of this form.

    seconds: of faults.  per_minute: faults, if they are random.  per_second: orders.  settle_s: after the last fault, until
    everything must have arrived.  interval_s: between the kills of the literal form.  strikes: these alone, of an earlier run.
    """

    form: Form = field(default_factory=Form)
    host: Host | None = None
    kind: Kind = Kind.RANDOM
    seconds: float = 120.0
    seed: int = 1
    per_minute: float = 50.0
    per_second: float = 40.0
    producers: int = 2
    consumers: int = 2
    settle_s: float = 60.0
    interval_s: float = 180.0
    strikes: Sequence[Strike] | None = None

    @property
    def scene(self) -> str:
        """Return what takes part, in words."""
        form = self.form
        center = (
            f"{form.servers} server(s), {form.databases} database(s) ({form.store}{', replicas' * form.replicas}), "
            f"delivery {form.delivery}"
            f"{', Consul' * form.consul}"
            if self.host is None
            else f"the center at {self.host.address}"
        )
        return f"{center}; {self.producers} producers, {self.consumers} consumers"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run.

    missed: faults that could not be made.  settled_s: from closing time until everything had arrived; None: it did not.
    ends: exit codes of programs that ended by themselves.
    """

    options: Options
    struck: Sequence[Struck]
    missed: Sequence[str]
    samples: Sequence[Sample]
    usages: Sequence[Usage]
    findings: Sequence[Finding]
    relations: Sequence[Relation]
    orders: int
    effects: int
    settled_s: float | None
    ends: dict[str, Sequence[int]]

    @property
    def is_clean(self) -> bool:
        return not self.findings and self.settled_s is not None and all(one.holds for one in self.relations)

    @property
    def kinds(self) -> Counter[str]:
        return Counter(one.strike.kind for one in self.struck)


def run(options: Options, folder: Path, say: Callable[[str], None]) -> Outcome:
    """Run a storm. folder: for the services' books and the logs, new or empty.

    Raises StormBroken, TimeoutError, grpc.RpcError: the run says nothing about the center.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scene: Scene
    if options.host is None:
        check_addresses = [f"127.0.0.1:{free_port()}" for _ in range(options.producers)]
        say("starting the world")
        scene = World(options.form, folder, {books.ORDERS_APP: check_addresses})
    else:
        check_addresses = [options.host.check_address, *[""] * (options.producers - 1)]
        scene = Visit(options.host, folder)
    try:
        cast = Cast(
            scene,
            check_addresses=check_addresses,
            consumers=options.consumers,
            per_second=options.per_second,
            seed=options.seed,
        )
        try:
            return _storm(options, scene, cast, say)
        finally:
            cast.stop()
    finally:
        scene.close()


def _storm(options: Options, scene: Scene, cast: Cast, say: Callable[[str], None]) -> Outcome:
    observer = Observer(scene, cast.since_ms)
    programs = [*scene.servers, *cast.programs]
    cast.start()
    eventually(lambda: observer.progress()[1] >= _FIRST_EFFECTS, seconds=60, describe=observer.progress)
    with Supervisor(programs), Progress(observer, programs) as progress:
        faults = nodes_of(scene, cast) if options.kind is Kind.LITERAL else faults_of(scene, cast)
        strikes = _plan(options, faults)
        last = max((strike.at_s + strike.lasts_s for strike in strikes), default=0.0)
        seconds = last + _CALM_S if options.kind is Kind.SURVEY else options.seconds
        say(f"seed {options.seed}: {len(strikes)} faults in {seconds:.0f} s")
        weather = Weather(faults, strikes, options.seed)
        began_s = progress.now_s
        struck = weather.rage(seconds)
        if strikes and not struck:
            raise StormBroken("no fault struck: give it more time")
        say("the storm is over: waiting until everything works again and has arrived")
        unavailable = [
            f"{missed.strike.kind}: {missed.why}" for missed in weather.missed if isinstance(missed.why, grpc.RpcError)
        ]
        unavailable += _not_back(observer, cast, options.settle_s)
        cast.close_shop()
        unavailable += _not_finished(cast, options.settle_s)
        found, settled_s = _settle(observer, options.settle_s)
        samples = list(progress.samples)
    books_of_all = dataclasses.replace(found, unavailable=unavailable, crashed=_crashed(scene, cast))
    return Outcome(
        options=options,
        struck=struck,
        missed=[f"{missed.strike.kind} at {missed.strike.part}: {missed.why}" for missed in weather.missed],
        samples=[
            Sample(at_s=round(sample.at_s - began_s, 2), orders=sample.orders, effects=sample.effects)
            for sample in samples
        ],
        usages=list(progress.usages),
        findings=judge(books_of_all),
        relations=relations(found),
        orders=len(found.sent),
        effects=sum(map(len, found.effects.values())),
        settled_s=settled_s,
        ends={program.name: program.ends for program in programs if program.ends},
    )


def _not_back(observer: Observer, cast: Cast, seconds: float) -> list[str]:
    """Wait until each producer has sent something in each way, with nothing broken. Returns: what did not work."""
    since = observer.last_order()
    missing = {(producer.name.replace(" ", "-"), way) for producer in cast.producers for way in cast.ways}
    end = time.monotonic() + seconds
    while missing and time.monotonic() < end:
        time.sleep(_LOOK_S)
        for key in observer.orders_after(since):
            name, _, way, *_ = key.split(".")
            missing.discard((name, way))
    return [f"{name} could send nothing by {way} after the storm" for name, way in sorted(missing)]


def _not_finished(cast: Cast, seconds: float) -> list[str]:
    """Wait until all producers have finished what they had begun. Returns: what is unfinished."""
    try:
        eventually(lambda: not cast.unfinished(), seconds=seconds)
    except TimeoutError:
        return [f"{name} waits for an answer to what it had begun" for name in cast.unfinished()]
    return []


def _crashed(scene: Scene, cast: Cast) -> list[str]:
    """Return which programs ended by themselves. A server may: it does when it starts while its database is away."""
    signals = [(server, code) for server in scene.servers for code in server.ends if code < 0]
    ended = [
        f"{program.name}: exit code {code}"
        for program, code in signals + [(program, code) for program in cast.programs for code in program.ends]
    ]
    return ended + [f"{program.name}: {how}" for program in cast.programs for how in program.bad_stops]


def _plan(options: Options, faults: Sequence[Fault]) -> Sequence[Strike]:
    if options.strikes is not None:
        return options.strikes
    match options.kind:
        case Kind.RANDOM:
            return random_plan(faults, seed=options.seed, seconds=options.seconds, per_minute=options.per_minute)
        case Kind.LITERAL:
            return literal_plan(
                faults, seed=options.seed, seconds=options.seconds, interval_s=options.interval_s, away_s=_AWAY_S
            )
        case Kind.SURVEY:
            return survey_plan(faults, seed=options.seed, calm_s=_CALM_S)


def _settle(observer: Observer, seconds: float) -> tuple[Books, float | None]:
    """Wait until everything has arrived and still has a moment later, or there was no progress for `seconds`.

    Returns: the books, and after how many seconds everything had arrived; None, it did not.
    """
    began = progressed = time.monotonic()
    progress = 0
    while True:
        arrived_s = time.monotonic() - began
        found = observer.books()
        if is_settled(found):
            time.sleep(_LATE_COPIES_S)  # a second copy would show
            found = observer.books()
            if is_settled(found):
                return found, arrived_s
        arrived = sum(map(len, (*found.effects.values(), *found.failed.values())))
        if arrived != progress:
            progress, progressed = arrived, time.monotonic()
        if time.monotonic() - progressed > seconds:
            return found, None
        time.sleep(_LOOK_S)
