from __future__ import annotations

import pytest
import torch

from checked_backend.modes.choice_tape import ChoiceTape, RecordChoices, ReplayChoices
from checked_backend.modes.monte_carlo import MonteCarloMode


def recorded(program):
    tape = ChoiceTape()
    with RecordChoices(tape):
        result = program()
    return tape, result


def held(program, tape, seed=0):
    hold = ReplayChoices(tape)
    with MonteCarloMode(seed, 4.0), hold:
        return program(), hold.flips


TIED = torch.arange(24.0).reshape(4, 6) % 3

PROGRAMS = {
    "argmax": lambda: (TIED * 1.1).argmax(-1),
    "topk": lambda: (TIED * 1.1).topk(2).indices,
    "sort": lambda: (TIED * 1.1).sort(-1).indices,
    "cast": lambda: (TIED * 1.1 / 1.1).to(torch.int64),
    "cast in place": lambda: torch.zeros(4, 6, dtype=torch.int32).copy_(TIED * 1.1 / 1.1),
    "comparison": lambda: TIED * 1.1 / 1.1 >= 1,
    "comparison in place": lambda: (TIED * 1.1 / 1.1).ge_(1.0),
    "floor": lambda: (TIED * 1.1 / 1.1).floor(),
    "division that rounds": lambda: torch.div(TIED * 1.1, 1.1, rounding_mode="floor"),
    "buckets": lambda: torch.bucketize(TIED * 1.1, torch.tensor([0.0, 1.1, 2.2])),
    "places": lambda: (TIED * 1.1 / 1.1 >= 1).nonzero(),
    "after operators that are taken apart": lambda: (
        torch.logsumexp(TIED, -1, keepdim=True) * 0 + torch.logaddexp(TIED, TIED) * 0 + TIED * 1.1 / 1.1 == TIED
    ),
    "what differs": lambda: torch.unique(TIED * 1.1, return_inverse=True)[1],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_rounding_flips_is_held(name):
    program = PROGRAMS[name]
    expected = program()
    tape, result = recorded(program)
    assert torch.equal(result, expected)
    free, flips = [], 0
    for seed in range(8):
        with MonteCarloMode(seed, 4.0):
            free.append(program())
        result, count = held(program, tape, seed)
        assert torch.equal(result, expected)
        flips += count
    assert any(not torch.equal(one, expected) for one in free)
    assert flips > 0


def test_gradients_follow_held_choices():
    x = TIED.clone().requires_grad_()

    def program():
        values, places = (x * 1.1).topk(2)
        return torch.autograd.grad((values * (1 + places)).sum() + (x * 1.1 / 1.1).floor().sum(), x)[0]

    tape, expected = recorded(program)
    for seed in range(4):
        result, flips = held(program, tape, seed)
        assert flips
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=0)
        assert torch.equal(result != 0, expected != 0)


def test_what_is_no_choice_is_left_alone():
    x = torch.randn(50)

    def program():
        return x.sin(), torch.relu(x), x.clamp(-0.5, 0.5), torch.arange(5) > 2, torch.empty_like(x, dtype=torch.int32)

    tape, _ = recorded(program)
    assert len(tape) == 0


def test_another_way_than_the_recorded_one_chooses_for_itself():
    x = torch.rand(20)
    tape, _ = recorded(lambda: x > 0.5)
    result, flips = held(lambda: (x * 1.1 < 0.2, x > 0.1), tape)
    assert flips == 1
    assert torch.equal(result[0], x * 1.1 < 0.2)
    assert torch.equal(result[1], x > 0.1)


def test_recorded_values_survive_what_the_program_writes_to_them():
    x = torch.rand(20)

    def program():
        mask = x > 0.5
        seen = mask.clone()
        mask.fill_(False)
        return seen

    tape, expected = recorded(program)
    result, flips = held(program, tape)
    assert torch.equal(result, expected)
    assert flips == 0
