"""The budget of a run: the share really spent, turns, rechecks, and no bursts. Time is a number here."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checked_backend.regions import budget
from checked_backend.regions.budget import Budget, Due, RegionBudget, Schedule


@dataclass
class Region:
    """A region that is simulated: seconds of its own run, and of its checks.

    Attributes:
        own: Seconds of an unchecked call.
        known: Those of a check against known noise, for each of the forward and the backward part.
        recheck: Those of a recheck.
        period: It is called every so many steps.
        until: It is not called after this time.
        checks: When it was checked, and whether that was a recheck.
    """

    own: float = 0.2
    known: float = 1.0
    recheck: float = 6.0
    period: int = 1
    until: float = float("inf")
    compiling: float = 0.0
    checks: list[tuple[float, bool | None]] = field(default_factory=list)
    schedule: RegionBudget | None = None


class Run:
    """A program that calls regions in turn, step by step."""

    def __init__(self, share: float, *regions: Region, gradients: bool = True, pause: float = 0.2) -> None:
        self.budget = Budget(share)
        self.now = 0.0
        self.paid: list[tuple[float, float]] = []
        self.regions: tuple[Region, ...] = ()
        self.gradients = gradients
        self.pause = pause
        self.steps = self.compared = 0
        self.build(*regions)

    def build(self, *regions: Region) -> None:
        self.regions = regions
        for region in regions:
            region.schedule = RegionBudget(
                self.budget, lambda: self.now, building=region.compiling, recheck=0.05 * region.compiling
            )

    def until(self, seconds: float, scale: float = 1.0) -> Run:
        while self.now < seconds:
            self.step(scale)
        return self

    def step(self, scale: float = 1.0) -> None:
        self.steps += 1
        backward = []
        for region in self.regions:
            schedule = region.schedule
            if schedule is None or self.steps % region.period or self.now > region.until:
                continue
            if schedule.skip():
                self.now += region.own
                continue
            due = schedule.due()
            if due is None:
                schedule.unchecked(self.run, [region.own])
                continue
            region.checks.append((self.now, due.recheck))
            self.pay(region, schedule, due, scale)
            backward += [(region, schedule, due)] * self.gradients
        for region, schedule, due in backward:
            self.pay(region, schedule, due, scale, backward=True)
        self.now += self.pause

    def run(self, seconds: float) -> None:
        self.now += seconds

    def pay(self, region: Region, schedule: RegionBudget, due: Due, scale: float, *, backward: bool = False) -> None:
        seconds = (region.recheck if due.recheck else region.known) * scale
        with schedule.charged(due, lambda _backward: self.compared, backward=backward) as meter:
            self.compared += 1
            self.now += seconds
            if not backward:
                with meter.program():
                    self.now += region.own
        self.paid.append((self.now, seconds))

    def share(self, since: float = 0.0) -> float:
        return sum(seconds for at, seconds in self.paid if at > since) / (self.now - since)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_the_share_is_of_the_run_however_many_regions_it_has(share: float, count: int) -> None:
    run = Run(share, *(Region() for _ in range(count))).until((100.0 + 50.0 * count) / share)
    assert 0.8 * share < run.share() < 1.2 * share
    assert run.share() == pytest.approx(run.budget.spent / run.now, rel=0.01)  # skipped calls are paid for too


@pytest.mark.parametrize("count", [1, 5, 50])
def test_a_hundredth_is_spent_within_two_minutes(count: int) -> None:
    """Regions of a few milliseconds, the rechecks of which take less than the estimate."""
    regions = [Region(own=2e-3, known=8e-3, recheck=40e-3, compiling=0.3) for _ in range(count)]
    run = Run(0.01, *regions, pause=2e-3).until(120.0)
    assert run.budget.spent / run.now == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("overhead", [0.0005, 0.005, 0.007, 0.05])
def test_however_much_skipping_calls_takes_there_are_checks(monkeypatch: pytest.MonkeyPatch, overhead: float) -> None:
    """Calls so short that skipping one takes a twentieth of it, five times the share that is asked for."""
    region = Region(own=0.01, known=0.05, recheck=0.3)
    monkeypatch.setattr(budget, "SKIPPING", overhead * region.own)
    run = Run(0.01, region, pause=0.0).until(3000.0)
    checks = sum(seconds for _, seconds in run.paid) / run.now
    assert checks == pytest.approx(max(0.01 - overhead, 0.002), rel=0.2)
    assert run.budget.spent / run.now == pytest.approx(checks + overhead, rel=0.1)


_region = st.builds(
    Region,
    own=st.floats(0.2, 0.6),
    known=st.floats(0.2, 2.0),
    recheck=st.floats(1.0, 5.0),
    period=st.sampled_from([1, 1, 2, 7]),
    compiling=st.floats(0, 30.0),
)


@settings(deadline=None, max_examples=15)
@given(
    share=st.sampled_from([0.05, 0.1, 0.2]),
    regions=st.lists(_region, min_size=1, max_size=3),
    scales=st.lists(st.floats(0.4, 2.5), min_size=1, max_size=6),
)
def test_any_sequence_of_costs_spends_the_share_and_starves_no_region(
    share: float, regions: list[Region], scales: list[float]
) -> None:
    """However costs vary from one check to the next, and between regions.

    What was saved for an estimate that proved too high is paid out slowly, so that the share is reached from below.
    Where costs vary, less of it is spent than where all are like the dearest.
    """
    regions = [Region(r.own, r.known, r.recheck, r.period, compiling=r.compiling) for r in regions]
    run = Run(share, *regions)
    until = sum(60 * r.own + 0.1 * r.compiling + 60 * r.recheck for r in regions) * 2 / share
    steps = 0
    while run.now < until:
        run.step(scales[steps // 7 % len(scales)])
        steps += 1
    assert run.share() <= 1.1 * share
    late = run.share(since=until / 2)
    dearest = 2 * max(scales) * max(max(r.known, r.recheck) for r in regions)
    lump = dearest / (run.now - until / 2)  # one check more or less, at the edge of what is looked at
    assert late <= 1.2 * share + lump
    could = steps * sum(2 * r.known * min(scales) / r.period for r in regions) / run.now
    least = 0.8 * share * sum(scales) / len(scales) / max(scales)
    assert late >= least - lump or could < 1.5 * share  # else there may be no more to check
    assert all({recheck for _, recheck in region.checks} == {True, False} for region in regions)


def test_regions_take_turns() -> None:
    regions = [Region() for _ in range(5)]
    Run(0.05, *regions).until(20000.0)
    counts = [sum(at > 5000.0 for at, _ in region.checks) for region in regions]
    assert max(counts) < 1.2 * min(counts)
    gaps = [later[0] - one[0] for r in regions for one, later in zip(r.checks[20:], r.checks[21:], strict=False)]
    assert max(gaps) < 20 * sum(gaps) / len(gaps)


def test_a_region_that_comes_first_after_each_rest_leaves_others_their_turn() -> None:
    """Its checks end so shortly before the other regions are called that these always come during the rest."""
    first, *others = regions = [Region(own=0.01, known=0.1, recheck=0.2) for _ in range(3)]
    run = Run(0.3, *regions, gradients=False)
    for _ in range(100):
        run.step()
        run.now += 10.0
    assert first.checks
    assert all(len(region.checks) > 20 for region in others)


def test_a_region_that_is_called_no_more_does_not_hold_up_the_others() -> None:
    """It waits for a verdict that costs a hundred times what the others' do."""
    left, other = Region(compiling=1000.0, until=60.0), Region()
    Run(0.05, left, other).until(20000.0)
    assert not left.checks
    assert len(other.checks) > 400


def test_a_region_that_is_compiled_anew_has_the_same_budget() -> None:
    run = Run(0.05, Region()).until(5000.0)
    for _ in range(4):
        run.build(Region())
        run.until(run.now + 1000.0)
    assert run.share() <= 0.06
    assert run.share(since=5000.0) <= 0.06


def test_rechecks_become_fewer() -> None:
    region = Region()
    Run(0.2, region, gradients=False).until(5000.0)
    numbers = [number for number, (_, recheck) in enumerate(region.checks, 1) if recheck]
    assert numbers[0] == 1
    assert len(numbers) <= len(region.checks).bit_length()
    assert len(numbers) >= len(region.checks).bit_length() - 2


def test_nothing_is_spent_in_a_burst_after_an_idle_hour() -> None:
    run = Run(0.05, Region(), Region()).until(4000.0)
    run.now += 36000.0
    before = run.now
    run.until(before + 1000.0)
    assert run.share(since=before) <= 0.05 + 2 * 12.0 / 1000.0  # the bucket holds two of the dearest checks


def test_checks_are_spread_out() -> None:
    run = Run(0.05, *(Region() for _ in range(4))).until(10000.0)
    windows = range(4000, 10000, 500)
    shares = [sum(s for at, s in run.paid if start < at <= start + 500) / 500 for start in windows]
    assert max(shares) < 1.5 * 0.05


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def at(clock: Clock, schedule: RegionBudget, now: float) -> Due | None:
    clock.now = now
    return schedule.due()


def test_building_a_region_earns_nothing_and_costs_nothing() -> None:
    bucket, clock = Budget(0.1), Clock()
    schedule = RegionBudget(bucket, clock)
    schedule.unchecked(lambda: None, [])
    assert at(clock, schedule, 0.0) is None
    clock.now = 1000.0
    RegionBudget(bucket, clock, building=1000.0)
    assert at(clock, schedule, 1000.0) is None
    assert at(clock, schedule, 1001.0) == Due(recheck=True)
    assert bucket.spent == 0.0


def test_the_first_and_every_nth_call() -> None:
    schedule = Schedule(3)
    assert [False if schedule.skip() else schedule.due() == Due() for _ in range(7)] == [True, False, False] * 2 + [
        True
    ]


def test_a_clock_that_goes_back_earns_nothing() -> None:
    clock = Clock()
    schedule = RegionBudget(Budget(0.5), clock, recheck=5.0)
    schedule.unchecked(lambda: None, [])
    for now in (10.0, 0.0, 9.0, 1.0, 10.0):
        assert at(clock, schedule, now) is None


def shown(seed: int, every: int, checks: int) -> bool:
    """Whether checks that were drawn meet a fault in every so many-th call."""
    region = Region(own=0.05, known=0.25, recheck=1.5)
    run = Run(0.05, region, pause=0.0)
    schedule = region.schedule
    assert schedule is not None
    schedule._random = random.Random(seed)
    drawn: list[int] = []
    due = schedule.due

    def noted() -> Due | None:
        found = due()
        if found is not None and found.recheck is False:
            drawn.append(run.steps)
        return found

    schedule.due = noted  # type: ignore[method-assign]
    while len(drawn) < checks:
        run.step()
    return any(step % every == seed % every for step in drawn)


def test_a_fault_is_met_with_the_probability_that_a_certificate_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the calls that are drawn 29 meet what one call in ten has: 1 - (1 - 1/10)^29 is 95 %."""
    runs = 150
    met = sum(shown(seed, every=10, checks=29) for seed in range(runs))
    assert met / runs > 0.95 - 3 * (0.05 * 0.95 / runs) ** 0.5
    monkeypatch.setattr(RegionBudget, "_drawn", lambda _self, _now: 0)
    met = sum(shown(seed, every=10, checks=29) for seed in range(40))
    assert met / 40 < 0.8  # checks that come in step with the program meet the same calls again and again


def test_what_is_drawn_repeats() -> None:
    checks = [region.checks for region in (Region(), Region()) if Run(0.1, region).until(2000.0)]
    assert checks[0] == checks[1]
