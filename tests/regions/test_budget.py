"""The budget of a run: the share really spent, turns, rechecks, and no bursts. Time is a number here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checked_backend.regions import schedule
from checked_backend.regions.schedule import Budget, RegionBudget, Schedule, TimedCheck, is_recheck


@pytest.fixture(autouse=True)
def _clock_of_a_run() -> Iterator[None]:
    """Each run has its own clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "clock", lambda: 0.0)
        yield


@dataclass
class Region:
    """A region that is simulated: seconds of its own run, and of its checks.

    Attributes:
        own: Seconds of an unchecked call.
        known: Those of a check against known noise, for each of the forward and the backward part.
        recheck: Those of a recheck.
        period: It is called every so many steps.
        building: Seconds in which it is built.
        first: Those that its first check takes beside a recheck's, as it compiles.
        checks: When it was checked, and whether that was a recheck.
    """

    own: float = 0.2
    known: float = 1.0
    recheck: float = 6.0
    period: int = 1
    building: float = 0.0
    first: float = 0.0
    checks: list[tuple[float, bool]] = field(default_factory=list)
    schedule: RegionBudget = field(init=False)


class Run:
    """A program that calls regions in turn, step by step."""

    def __init__(self, share: float, *regions: Region, pause: float = 0.2) -> None:
        self.budget = Budget(share)
        self.now = 0.0
        self.paid: list[tuple[float, float]] = []
        self.pause = pause
        self.steps = 0
        self.regions = list[Region]()
        self.build(*regions)

    def build(self, *regions: Region) -> None:
        schedule.clock = lambda: self.now
        for region in regions:
            self.now += region.building
            region.schedule = RegionBudget(self.budget, building=region.building, first=region.first)
            self.regions.append(region)

    def until(self, seconds: float) -> Run:
        while self.now < seconds:
            self.step()
        return self

    def step(self, scale: float = 1.0) -> None:
        self.steps += 1
        backward = []
        for region in self.regions:
            if self.steps % region.period:
                continue
            if region.schedule.skip():
                self.now += region.own
            elif (check := region.schedule.due()) is None:
                region.schedule.unchecked(self.pass_time, [region.own])
            else:
                region.checks.append((self.now, is_recheck(check.number)))
                self.check(region, check, scale)
                backward.append((region, check))
        for region, check in backward:
            self.check(region, check, scale, backward=True)
        self.now += self.pause

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def check(self, region: Region, check: TimedCheck, scale: float, *, backward: bool = False) -> None:
        seconds = (region.recheck if is_recheck(check.number) else region.known) * scale
        seconds += region.first if check.number == 1 and not backward else 0.0
        with region.schedule.charged(check, backward=backward):
            check.made = True
            self.now += seconds
            if not backward:
                with check.program():
                    self.now += region.own
        self.paid.append((self.now, seconds))

    def share(self, since: float = 0.0, until: float = float("inf")) -> float:
        return sum(seconds for at, seconds in self.paid if since < at <= until) / (min(self.now, until) - since)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_the_share_is_of_the_run_however_many_regions_it_has(share: float, count: int) -> None:
    run = Run(share, *(Region() for _ in range(count))).until((100.0 + 50.0 * count) / share)
    assert 0.8 * share < run.share() < 1.2 * share
    assert run.share() == pytest.approx(run.budget.spent / run.now, rel=0.01)  # skipped calls are paid for too


@pytest.mark.parametrize("count", [1, 5, 50])
def test_a_hundredth_is_spent_within_two_minutes(count: int) -> None:
    """Regions of a few milliseconds, the rechecks of which take less than is expected."""
    regions = [Region(own=2e-3, known=8e-3, recheck=40e-3, first=0.015) for _ in range(count)]
    run = Run(0.01, *regions, pause=2e-3).until(120.0)
    assert run.budget.spent / run.now == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("overhead", [0.0005, 0.005, 0.007, 0.05])
def test_however_much_skipping_calls_takes_there_are_checks(monkeypatch: pytest.MonkeyPatch, overhead: float) -> None:
    """Calls so short that skipping one takes a twentieth of it, five times the share that is asked for."""
    region = Region(own=0.01, known=0.05, recheck=0.3)
    monkeypatch.setattr(schedule, "SKIPPING", overhead * region.own)
    run = Run(0.01, region, pause=0.0).until(3000.0)
    assert run.share() == pytest.approx(max(0.01 - overhead, 0.002), rel=0.2)
    assert run.budget.spent / run.now == pytest.approx(run.share() + overhead, rel=0.1)


_region = st.builds(
    Region,
    own=st.floats(0.2, 0.6),
    known=st.floats(0.2, 2.0),
    recheck=st.floats(1.0, 5.0),
    period=st.sampled_from([1, 1, 2, 7]),
    building=st.floats(0, 30.0),
    first=st.floats(0, 2.0),
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
    """However costs vary from one check to the next, and between regions."""
    run = Run(share, *(replace(region, checks=[]) for region in regions))
    until = sum(60 * r.own + r.first + 60 * r.recheck for r in regions) * 2 / share
    while run.now < until:
        run.step(scales[run.steps // 7 % len(scales)])
    assert run.share() <= 1.1 * share
    late = run.share(since=until / 2)
    dearest = 2 * max(scales) * max(max(r.known, r.recheck) for r in regions)
    lump = dearest / (run.now - until / 2)  # one check more or less, at the edge of what is looked at
    assert late <= 1.2 * share + lump
    could = run.steps * sum(2 * r.known * min(scales) / r.period for r in regions) / run.now
    assert late >= 0.8 * share - lump or could < 1.5 * share  # else there may be no more to check
    assert all({recheck for _, recheck in region.checks} == {True, False} for region in run.regions)


def test_regions_take_turns_and_checks_are_spread_out() -> None:
    regions = [Region() for _ in range(5)]
    run = Run(0.05, *regions).until(20000.0)
    counts = [sum(at > 5000.0 for at, _ in region.checks) for region in regions]
    assert max(counts) < 1.2 * min(counts)
    gaps = [later[0] - one[0] for r in regions for one, later in zip(r.checks[20:], r.checks[21:], strict=False)]
    assert max(gaps) < 20 * sum(gaps) / len(gaps)
    assert max(run.share(start, start + 500) for start in range(5000, 20000, 500)) < 1.5 * 0.05


def test_the_first_check_of_a_region_comes_before_the_second_of_another() -> None:
    regions = [Region(own=own, known=5 * own, recheck=30 * own) for own in (0.2, 0.01, 0.05, 1.0, 0.1)]
    run = Run(0.05, *regions)
    while min(len(region.checks) for region in regions) == 0:
        run.step()
        assert max(len(region.checks) for region in regions) <= 1


def test_a_region_that_is_seldom_called_is_checked_too() -> None:
    """A validation between two long epochs, in which the other region is checked a hundred times."""
    training, validation = Region(own=0.02, known=0.1, recheck=0.3), Region(own=0.05, recheck=0.5, period=10000)
    Run(0.1, training, validation, pause=0.0).until(3000.0)
    assert len(training.checks) > 500
    assert len(validation.checks) > 3


def test_a_region_that_is_built_later_leaves_the_others_their_turn() -> None:
    earlier, later = Region(), Region()
    run = Run(0.1, earlier).until(20000.0)
    known = len(earlier.checks)
    run.build(later)
    run.until(22000.0)
    assert len(later.checks) > 20
    assert len(earlier.checks) > known + 20


def test_what_the_first_check_compiles_is_not_expected_of_the_second() -> None:
    region = Region(first=100.0)
    Run(0.1, region).until(2000.0)
    (first, _), (second, _) = region.checks[:2]
    assert first > 1000.0
    assert second < first + 100.0 + 300.0


def test_a_region_that_is_called_no_more_does_not_hold_up_the_others() -> None:
    """It waits for a check that costs a hundred times what the others' do."""
    left, other = Region(first=50.0), Region()
    run = Run(0.05, left, other).until(60.0)
    run.regions.remove(left)
    run.until(20000.0)
    assert not left.checks
    assert len(other.checks) > 400


def test_a_region_that_is_compiled_anew_has_the_same_budget() -> None:
    run = Run(0.05, Region()).until(5000.0)
    for _ in range(4):
        run.regions.clear()
        run.build(Region())
        run.until(run.now + 1000.0)
    assert run.share() <= 0.06
    assert run.share(since=5000.0) <= 0.06


def test_rechecks_become_fewer() -> None:
    region = Region()
    Run(0.2, region).until(5000.0)
    numbers = [number for number, (_, recheck) in enumerate(region.checks, 1) if recheck]
    assert numbers == [1 << place for place in range(len(region.checks).bit_length())]


def test_nothing_is_spent_in_a_burst_after_an_idle_hour() -> None:
    run = Run(0.05, Region(), Region()).until(4000.0)
    run.now += 36000.0
    before = run.now
    run.until(before + 1000.0)
    assert run.share(since=before) <= 0.05 + 2 * 12.0 / 1000.0  # the bucket holds two of the dearest checks


def test_building_a_region_earns_nothing_and_costs_nothing() -> None:
    run = Run(0.1, Region(first=1.0), pause=0.0).until(5.0)
    run.build(Region(building=1000.0))
    assert run.budget.holds(run.now) == pytest.approx(0.5, rel=0.1)
    assert run.budget.spent == 0.0


def test_a_clock_that_goes_back_earns_nothing() -> None:
    region = Region(first=5.0)
    run = Run(0.5, region)
    for run.now in (10.0, 0.0, 9.0, 1.0, 10.0):
        run.step()
    assert not region.checks


def test_the_first_and_every_nth_call() -> None:
    every_third = Schedule(3)
    checked = [not every_third.skip() and every_third.due() is not None for _ in range(7)]
    assert checked == [True, False, False, True, False, False, True]


def met(seed: int, *, drawn: bool) -> bool:
    """Whether 29 checks that are drawn meet a fault in every tenth call."""
    region = Region(own=0.05, known=0.25, recheck=1.5)
    run = Run(0.05, region, pause=0.0)
    run.budget.random = random.Random(seed)
    if not drawn:
        run.budget.random.random = lambda: 0.0  # type: ignore[method-assign]
    steps: list[int] = []
    while len(steps) < 29:
        known = len(region.checks)
        run.step()
        steps += [run.steps for _, recheck in region.checks[known:] if not recheck]
    return any(step % 10 == seed % 10 for step in steps)


def test_a_fault_is_met_with_the_probability_that_a_certificate_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the calls that are drawn 29 meet what one call in ten has: 1 - (1 - 1/10)^29 is 95 %."""
    runs = 150
    monkeypatch.setattr(schedule, "SKIPPING", 0.0)  # its tiny costs shift the checks, too
    assert sum(met(seed, drawn=True) for seed in range(runs)) / runs > 0.95 - 3 * (0.05 * 0.95 / runs) ** 0.5
    # checks that come in step with the program meet the same calls again and again
    assert sum(met(seed, drawn=False) for seed in range(40)) / 40 < 0.8


def test_what_is_drawn_repeats() -> None:
    checks = [region.checks for region in (Region(), Region()) if Run(0.1, region).until(2000.0)]
    assert checks[0] == checks[1]
