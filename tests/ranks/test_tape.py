"""What is exchanged with other ranks is recorded once and replayed: here with a group of one rank, in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from checked_backend.ranks.tape import (
    CollectiveReplayError,
    CollectiveTape,
    RecordCollectives,
    ReplayCollectives,
    indistinguishable,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def reduced(x: torch.Tensor, how: str = "sum") -> torch.Tensor:
    return functional.all_reduce(x, how, dist.group.WORLD)


def recorded(program: Callable[[], torch.Tensor]) -> tuple[CollectiveTape, torch.Tensor]:
    tape = CollectiveTape()
    mode = RecordCollectives(tape)
    with mode:
        result = program()
    mode.finish()
    return tape, result


ONE, TWO = torch.arange(4.0), torch.arange(4.0) + 10


def test_results_and_what_is_sent_are_kept_apart_from_later_writes() -> None:
    def program() -> torch.Tensor:
        x = ONE.clone()
        y = reduced(x) + 0
        x.zero_()
        return y

    tape, result = recorded(program)
    [exchange] = tape.exchanges
    assert exchange.family == "all_reduce"
    assert torch.equal(exchange.sent, ONE)
    assert torch.equal(exchange.received, result)


def test_a_replay_receives_what_was_recorded_and_sends_nothing() -> None:
    tape, _ = recorded(lambda: reduced(ONE) * 1)
    tape.exchanges[0].received = ONE + 100  # as if from other ranks
    run = ReplayCollectives(tape, pairs=True)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with run:
        result = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(ONE * 1.001, "sum", "0"))
    assert torch.equal(result, ONE + 100)
    assert run.in_step
    assert list(run.values()) == ["sent[all_reduce_0]"]
    assert torch.equal(run.values()["sent[all_reduce_0]"], ONE * 1.001)


def test_results_take_the_precision_of_the_run() -> None:
    tape, _ = recorded(lambda: reduced(ONE) * 1)
    with ReplayCollectives(tape):
        assert (reduced(ONE.double()) * 1).dtype is torch.float64


def test_collectives_in_another_order_find_their_own() -> None:
    tape, _ = recorded(lambda: reduced(ONE) + reduced(TWO))
    run = ReplayCollectives(tape, pairs=True)
    with run:
        second, first = reduced(TWO * 1.0001) * 1, reduced(ONE * 1.0001) * 1
    assert torch.equal(first, ONE)
    assert torch.equal(second, TWO)
    assert not run.missing
    assert not run.in_step


def test_of_two_that_are_near_the_one_that_sends_the_same_is_found() -> None:
    near = TWO * 1.02
    tape, _ = recorded(lambda: reduced(near) + reduced(TWO))
    with ReplayCollectives(tape, pairs=True):
        second, first = reduced(TWO * (1 + 1e-6)) * 1, reduced(near * (1 - 1e-6)) * 1
    assert torch.equal(first, near)
    assert torch.equal(second, TWO)


def test_of_two_that_differ_by_rounding_alone_the_order_decides() -> None:
    alike = TWO * (1 + 1e-6)
    tape, _ = recorded(lambda: reduced(alike) + reduced(TWO))
    tape.exchanges[0].received, tape.exchanges[1].received = ONE, TWO
    run = ReplayCollectives(tape, pairs=True)
    with run:
        first, second = reduced(TWO) * 1, reduced(alike) * 1
    assert torch.equal(first, ONE)
    assert torch.equal(second, TWO)
    assert run.in_step


def test_equal_collectives_that_a_compiler_merged_are_no_difference() -> None:
    tape, _ = recorded(lambda: reduced(ONE) * 1)
    run = ReplayCollectives(tape, pairs=True)
    with run:
        result = reduced(ONE) + reduced(ONE)
    assert torch.equal(result, 2 * ONE)
    assert not run.missing
    assert not run.in_step  # eager alone would send it twice


def test_several_at_once_are_the_same_as_one_by_one() -> None:
    tape, _ = recorded(lambda: sum(functional.all_reduce_coalesced([ONE, TWO], "sum", dist.group.WORLD)))
    run = ReplayCollectives(tape, pairs=True)
    with run:
        assert torch.equal(reduced(ONE) + reduced(TWO), ONE + TWO)
    assert run.in_step


def test_in_place_is_the_same_as_with_a_result() -> None:
    def in_place() -> torch.Tensor:
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(ONE.clone(), "sum", "0"))

    tape, _ = recorded(in_place)
    run = ReplayCollectives(tape, pairs=True)
    with run:
        assert torch.equal(reduced(ONE) * 1, ONE)
        assert torch.equal(in_place(), ONE)
    assert not run.missing


def test_what_is_wrong_is_still_held_against_its_place() -> None:
    tape, _ = recorded(lambda: reduced(ONE) * 1)
    run = ReplayCollectives(tape, pairs=True)
    with run:
        reduced(-ONE)
    assert not run.doubtful
    assert torch.equal(run.values()["sent[all_reduce_0]"], -ONE)


def test_what_is_not_on_the_tape_is_missing_or_raises() -> None:
    tape, _ = recorded(lambda: reduced(ONE) * 1)
    run = ReplayCollectives(tape, pairs=True)
    with run:
        assert (reduced(ONE, "max") * 1).count_nonzero() == 0
    assert [str(one) for one in run.missing] == ["all_reduce(float32[4], reduce_op=max, group_name=0)"]
    assert run.doubtful
    with pytest.raises(CollectiveReplayError, match="not among what was exchanged"), ReplayCollectives(tape):
        reduced(ONE, "max")


def test_a_backward_pass_may_issue_those_of_the_forward_pass_again() -> None:
    forward, _ = recorded(lambda: reduced(ONE) * 1)
    backward, _ = recorded(lambda: reduced(TWO) * 1)
    run = ReplayCollectives(backward, [forward], pairs=True, where="backward ")
    with run:
        again, gradient = reduced(ONE) * 1, reduced(TWO) * 1
    assert torch.equal(again, ONE)
    assert torch.equal(gradient, TWO)
    assert list(run.values()) == ["sent[backward all_reduce_0]"]


def test_what_cannot_be_seen_from_outside_is_told_and_never_issued_again() -> None:
    def program() -> torch.Tensor:
        x = ONE.clone()
        dist.all_reduce(x)
        return x

    tape, _ = recorded(program)
    assert tape.opaque.startswith("c10d.allreduce_")
    with pytest.raises(CollectiveReplayError, match="cannot be replayed"), ReplayCollectives(tape):
        program()


def test_exchanges_that_send_the_same_and_receive_otherwise_are_indistinguishable() -> None:
    tape, _ = recorded(lambda: reduced(ONE) * reduced(ONE) * reduced(TWO) * reduced(ONE, "max"))
    assert not indistinguishable(tape.exchanges)
    tape.exchanges[1].received = TWO
    assert indistinguishable(tape.exchanges) == [tape.exchanges[:2]]


def test_a_collective_that_fails_is_noted() -> None:
    tape = CollectiveTape()
    with pytest.raises(RuntimeError), RecordCollectives(tape):
        torch.ops._c10d_functional.all_reduce(ONE, "sum", "no such group")
    assert tape.failed is not None


def test_gradients_flow_through_a_replay() -> None:
    x = ONE.clone().requires_grad_()
    forward, _ = recorded(lambda: reduced(x) * 1)
    backward, _ = recorded(lambda: reduced(torch.ones(4)) * 1)
    with ReplayCollectives(forward):
        y = (reduced(x) * 1).sum()
    with ReplayCollectives(backward):
        y.backward()
    assert torch.equal(x.grad, torch.ones(4))
