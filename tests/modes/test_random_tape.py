from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from checked_backend.errors import CheckedBackendError, ReplayError
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from tests.support.mode_programs import CASES, same


def record(program, seed=0):
    tape = RandomTape()
    torch.manual_seed(seed)
    with RecordRandom(tape):
        result = program()
    return tape, result


@pytest.mark.parametrize("name", CASES)
def test_recording_changes_nothing_and_replay_repeats(name):
    case = CASES[name]()
    torch.manual_seed(3)
    expected = case.run()
    generator_after = torch.get_rng_state()
    tape, recorded = record(case.run, seed=3)
    assert same(recorded, expected)
    assert torch.equal(torch.get_rng_state(), generator_after)
    assert tape.empty == (name == "conv")
    torch.manual_seed(4)
    before = torch.get_rng_state()
    with ReplayRandom(tape) as replay:
        replayed = case.run()
    assert same(replayed, expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert replay.position == len(tape)


SHAPE = (5, 7)
PROBABILITIES = torch.full(SHAPE, 0.3)
PROGRAMS = {
    "rand": lambda: torch.rand(SHAPE),
    "rand.generator": lambda: torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)),
    "randn": lambda: torch.randn(SHAPE, dtype=torch.bfloat16),
    "randint": lambda: torch.randint(0, 9, SHAPE),
    "randperm": lambda: torch.randperm(9),
    "rand_like": lambda: torch.rand_like(PROBABILITIES),
    "randint_like": lambda: torch.randint_like(PROBABILITIES, 7),
    "uniform_": lambda: torch.empty(SHAPE).uniform_(),
    "normal_": lambda: torch.empty(SHAPE).normal_(2, 3),
    "exponential_": lambda: torch.empty(SHAPE).exponential_(),
    "geometric_": lambda: torch.empty(SHAPE).geometric_(0.3),
    "random_": lambda: torch.empty(SHAPE, dtype=torch.int64).random_(),
    "bernoulli": lambda: torch.bernoulli(PROBABILITIES),
    "bernoulli_": lambda: torch.empty(SHAPE).bernoulli_(0.5),
    "bernoulli_.Tensor": lambda: torch.empty(SHAPE).bernoulli_(PROBABILITIES),
    "multinomial": lambda: torch.multinomial(PROBABILITIES, 3),
    "poisson": lambda: torch.poisson(PROBABILITIES * 9),
    "normal.Tensor": lambda: torch.normal(PROBABILITIES, PROBABILITIES),
    "normal.float": lambda: torch.normal(0.0, 1.0, SHAPE),
    "native_dropout": lambda: torch.native_dropout(PROBABILITIES, 0.4, True)[0],
    "alpha_dropout": lambda: F.alpha_dropout(PROBABILITIES, 0.4, training=True),
    "feature_dropout": lambda: F.dropout2d(PROBABILITIES.view(1, 5, 7, 1), 0.4),
    "rrelu": lambda: F.rrelu(torch.linspace(-1, 1, 35), training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(PROBABILITIES),
    "out": lambda: torch.rand(SHAPE, out=torch.empty(SHAPE)),
    "attention": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 2, 4, 8)] * 3, dropout_p=0.5),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kind_of_random_operator(name):
    program = PROGRAMS[name]
    expected = program()
    tape, recorded = record(program)
    assert not tape.empty
    assert torch.equal(recorded, expected)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with ReplayRandom(tape):
        replayed = program()
    assert torch.equal(replayed, expected)
    assert (replayed.dtype, replayed.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(torch.get_rng_state(), before)


def test_inference_mode_draws_are_seen():
    x = torch.ones(4, 8)
    with torch.inference_mode():
        tape, recorded = record(lambda: F.dropout(x, 0.5))
        with ReplayRandom(tape):
            assert torch.equal(F.dropout(x, 0.5), recorded)


def test_dropout_keeps_its_mask_on_other_inputs():
    x = torch.randn(100)
    tape, recorded = record(lambda: torch.native_dropout(x, 0.25, True))
    with ReplayRandom(tape):
        out, mask = torch.native_dropout(x.double() * 2, 0.25, True)
    assert torch.equal(mask, recorded[1])
    assert out.dtype == torch.float64
    assert torch.allclose(out, x.double() * 2 * mask / 0.75, rtol=1e-15)


def test_outcome_follows_the_dtype_of_the_run():
    tape, recorded = record(lambda: torch.rand_like(torch.empty(3)))
    with ReplayRandom(tape):
        replayed = torch.rand_like(torch.empty(3, dtype=torch.float64))
    assert replayed.dtype == torch.float64
    assert torch.equal(replayed, recorded.double())


def test_tape_keeps_copies():
    def program():
        noise = torch.rand(10)
        first = noise.clone()
        noise.zero_()
        return first

    tape, recorded = record(program)
    for _ in range(2):
        with ReplayRandom(tape):
            assert torch.equal(program(), recorded)


def test_mismatches_are_errors():
    tape, _ = record(lambda: torch.rand(3))
    assert tape.ops == ("aten.rand.default",)
    with ReplayRandom(tape), pytest.raises(ReplayError, match=r"aten\.randn\.default draws.*aten\.rand\.default"):
        torch.randn(3)
    with ReplayRandom(tape), pytest.raises(ReplayError, match=r"aten\.rand\.default.*other shapes"):
        torch.rand(4)
    with ReplayRandom(tape), pytest.raises(ReplayError, match="after the end of the tape, which has 1 outcomes"):
        torch.rand(3), torch.rand(3)
    assert issubclass(ReplayError, CheckedBackendError)


def test_attention_kernel_without_dropout_is_not_random():
    q = torch.randn(1, 2, 8, 16)
    tape, _ = record(lambda: F.scaled_dot_product_attention(q, q, q))
    assert tape.empty


def test_dropout_that_cannot_be_repeated_is_refused():
    with torch.library._scoped_library("checked_backend_test_random", "DEF") as library:
        library.define("cudnn_rnn(Tensor q, float dropout) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        library.impl("cudnn_rnn", lambda q, dropout: q * 2, "CPU")
        op = torch.ops.checked_backend_test_random.cudnn_rnn
        tape, _ = record(lambda: op(torch.ones(2), 0.5))
        with ReplayRandom(tape), pytest.raises(ReplayError, match="draws inside its kernel"):
            op(torch.ones(2), 0.5)
        assert record(lambda: op(torch.ones(2), 0.0))[0].empty


def test_control_flow_and_checkpoint():
    x = torch.randn(8, requires_grad=True)

    def body(t):
        return F.dropout(t.sin(), 0.5).exp()

    def program():
        out = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
        branches = (lambda t: (torch.rand_like(t) * t,), lambda t: (body(t),))
        out = out + torch.ops.higher_order.cond(out.sum() > 0, *branches, (out.detach(),))[0]
        return [out.detach(), *torch.autograd.grad(out.sum(), [x])]

    tape, recorded = record(program)
    assert "aten.rand_like.default" in tape.ops
    with ReplayRandom(tape):
        assert same(program(), recorded)
