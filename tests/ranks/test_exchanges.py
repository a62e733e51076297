"""Regions that exchange tensors with other ranks: checked without exchanging anything a second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import LIMIT, run_ranks, values_of

PROGRAM = "tests.support.rank_programs:several"
SENT = "tensors sent to other ranks"
SENDING_THE_SAME: tuple[dict[str, Any], ...] = (
    {"fault": "after", "on": 0},
    {"fault": "after", "on": 0, "receives": True},
    {},
)


def ran(folder: Path, *programs: tuple[str, dict[str, Any]], world: int = 2, limit: float = LIMIT) -> list[list[Any]]:
    """What some programs gave, one after the other in the same ranks: for each program, of each rank."""
    ranks = values_of(run_ranks(PROGRAM, folder, world=world, limit=limit, programs=programs))
    return [list(of_program) for of_program in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """All in one pair of processes: starting them takes as long as ten programs."""
    return ran(
        tmp_path_factory.mktemp("both"),
        ("sharded", {}),
        ("unlike", {}),
        ("exchanging", {}),
        ("exchanging", {"recomputed": True}),
        ("alike", {"kind": "tensor parallel", "steps": 4}),
        ("alike", {"kind": "fsdp", "steps": 3}),
        ("replicated", {"drifts": False}),
        ("half_precision", {}),
        ("sharded", {"fault": "before"}),
        ("sharded", {"fault": "after", "gradients": False}),
        ("sharded", {"fault": "dropped", "on": None, "localize": True}),
        ("sharded", {"fault": "reduction", "on": None, "gradients": False}),
        ("sharded", {"fault": "before", "on_divergence": "fallback"}),
        ("sharded", {"fault": "merged", "on": None}),
        ("replicated", {"drifts": True}),
        ("half_precision", {"fault": "aten.gelu.default"}),
        ("half_precision", {"fault": "aten.tanh.default"}),
        ("half_precision", {"fault": "aten.gelu_backward.default"}),
        *(("sending_the_same", given) for given in SENDING_THE_SAME),
        limit=2 * LIMIT,
    )


@pytest.fixture
def clean(both: list[list[Any]]) -> list[list[Any]]:
    return both[:8]


@pytest.fixture
def wrong(both: list[list[Any]]) -> list[list[Any]]:
    return both[8:]


def passed(told: dict[str, Any]) -> bool:
    if told["verdict"] != "pass" or told["skips"]:
        raise AssertionError(told["text"])
    return True


@pytest.mark.process
def test_what_is_sent_is_compared_in_both_passes(clean: list[list[Any]]) -> None:
    for told in clean[0]:
        assert passed(told)
        assert told["checked"][SENT] == 2 * 4


@pytest.mark.process
def test_ranks_that_check_other_calls_neither_wait_nor_disagree(clean: list[list[Any]]) -> None:
    first, second = clean[1]
    assert passed(first)
    assert passed(second)
    assert (first["checked"]["outputs"], second["checked"]["outputs"]) == (12, 4)


@pytest.mark.process
def test_every_kind_of_collective_changes_no_bit(clean: list[list[Any]]) -> None:
    for program in clean[2:4]:
        for told in program:
            assert passed(told)
            assert told["equal"]


@pytest.mark.process
def test_collectives_of_a_checkpoint_are_not_issued_for_eager(clean: list[list[Any]]) -> None:
    plain, recomputed = clean[2][0], clean[3][0]
    assert recomputed["checked"]["gradients"] == plain["checked"]["gradients"]


@pytest.mark.process
def test_a_tensor_parallel_model_passes_with_the_same_weights(clean: list[list[Any]]) -> None:
    for told in clean[4]:
        assert passed(told)
        assert told["equal"]
        assert told["checked"][SENT] > 0


@pytest.mark.process
def test_compiled_blocks_of_a_sharded_model_pass_with_the_same_weights(clean: list[list[Any]]) -> None:
    for told in clean[5]:
        assert passed(told)
        assert told["equal"]
        assert told["checked"]["gradients"] > 0


@pytest.mark.process
def test_an_error_before_a_collective_is_named_there_and_on_its_rank_alone(wrong: list[list[Any]]) -> None:
    innocent, guilty = wrong[0]
    assert passed(innocent)
    assert ["logic", "sent[all_reduce_0]"] in guilty["findings"]
    assert not any(subject.startswith("output") for _, subject in guilty["findings"])
    assert "functional.all_reduce(partial" in guilty["text"]


@pytest.mark.process
def test_an_error_after_a_collective_is_one_of_the_result(wrong: list[list[Any]]) -> None:
    innocent, guilty = wrong[1]
    assert passed(innocent)
    assert guilty["findings"] == [["logic", "output[0]"]]


@pytest.mark.process
def test_a_collective_that_is_left_out_is_found(wrong: list[list[Any]]) -> None:
    for told in wrong[2]:
        assert told["findings"] == [["structure.collective", "sent[all_reduce]"]]
        assert "expected    all_reduce(float32[4, 8], reduce_op=sum" in told["text"]
        assert "actual      nothing" in told["text"]
        assert told["evidence"][0]["localized"].startswith("no: the collective itself is named")


@pytest.mark.process
def test_another_reduction_is_found(wrong: list[list[Any]]) -> None:
    for told in wrong[3]:
        assert told["findings"] == [["structure.collective", "sent[all_reduce]"]]
        assert "reduce_op=max" in told["text"]


@pytest.mark.process
def test_findings_say_on_which_rank_and_in_which_call(wrong: list[list[Any]]) -> None:
    _, guilty = wrong[0]
    assert all(found["rank"].startswith("1 on ") for found in guilty["evidence"])
    assert {found["first_call"] for found in guilty["evidence"]} == {1}


@pytest.mark.process
def test_other_ranks_note_what_one_has_found(wrong: list[list[Any]]) -> None:
    innocent, guilty = wrong[0]
    assert any("rank 1 on" in note and "sent[all_reduce_0]" in note for note in innocent["notes"])
    assert not any("rank 1 on" in note for note in guilty["notes"])


@pytest.mark.process
def test_equal_parameters_are_held_against_rank_0(clean: list[list[Any]]) -> None:
    first, second = clean[6]
    assert passed(first)
    assert passed(second)
    assert second["checked"]["parameters held against rank 0"] == 6 * 2  # after calls 4 and 8


@pytest.mark.process
def test_a_parameter_that_drifted_is_found_on_its_rank(wrong: list[list[Any]]) -> None:
    first, second = wrong[6]
    assert passed(first)
    assert second["findings"] == [["logic.ranks", "param[up.weight]"]]


@pytest.mark.process
def test_raise_ends_all_ranks_with_the_same_report(tmp_path: Path) -> None:
    given = {"fault": "before", "on_divergence": "raise"}
    ranks = run_ranks("tests.support.rank_programs:sharded", tmp_path, **given)
    for rank in ranks:
        assert rank.code != 0
        assert "DivergenceError: FAIL" in rank.output
        assert "logic, sent[all_reduce_0]" in rank.output
    assert "this was found by rank 1" in ranks[0].output
    [report] = (tmp_path / "checked_backend_reports").glob("*.json")
    assert "-rank1-" in report.name
    assert all(report.name in rank.output for rank in ranks)


@pytest.mark.slow
def test_raise_ends_all_ranks_also_where_the_other_waits_for_the_next_call(tmp_path: Path) -> None:
    given = {"fault": "after", "on_divergence": "raise", "gradients": False}
    for rank in run_ranks("tests.support.rank_programs:sharded", tmp_path, **given):
        assert "DivergenceError: FAIL" in rank.output
        assert "logic, output[0]" in rank.output


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_rank_that_waits_outside_of_every_region_says_why_it_has_failed(tmp_path: Path) -> None:
    guilty, other = run_ranks("tests.support.rank_programs:data_parallel", tmp_path, on=0)
    assert "DivergenceError: FAIL" in guilty.output
    assert other.code == 1
    for words in ("RuntimeError", "which may be why this one failed", "logic, output[0]"):
        assert words in other.output


@pytest.mark.process
def test_one_rank_may_fall_back_to_eager_alone(wrong: list[list[Any]]) -> None:
    innocent, guilty = wrong[4]
    assert passed(innocent)
    assert innocent["checked"]["outputs"] == 4
    assert guilty["checked"]["outputs"] == 1  # then it is in eager, and in step


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_compiled_backward_pass_that_raises_between_exchanges_ends_its_rank(tmp_path: Path) -> None:
    for rank in run_ranks("tests.support.rank_programs:crashing", tmp_path, at="tanh_backward", on=1):
        assert rank.code == 1
    assert "PlantedError: a kernel is missing" in rank.output
    [report] = (tmp_path / "checked_backend_reports").glob("*.json")
    assert '"crash.backward"' in report.read_text()


@pytest.mark.process
def test_what_another_order_of_exchanges_may_explain_accuses_no_rank_where_it_cannot_be_seen(
    wrong: list[list[Any]],
) -> None:
    for unsure, sure in wrong[-3:]:
        assert passed(sure)
        assert (unsure["verdict"], unsure["findings"]) == ("inconclusive", [])
        assert any("may only have another order" in reason for _, reason, matters in unsure["skips"] if matters)


@pytest.mark.process
def test_operators_around_an_exchange_are_checked_by_themselves(clean: list[list[Any]]) -> None:
    for told in clean[7]:
        assert passed(told)
        assert told["checked"]["operators"] == 2 * 16


@pytest.mark.process
def test_an_operator_that_is_wrong_in_one_precision_alone_is_named_on_its_side_of_an_exchange(
    wrong: list[list[Any]],
) -> None:
    subjects = ("sent[all_reduce_0]", "output[0]", "grad[first.weight]")
    operators = (("torch._C._nn.gelu", "gelu(self.first(x))"), ("torch.tanh", "torch.tanh(total * 0.5)"))
    for program, subject, (op, line) in zip(wrong[7:10], subjects, (*operators, operators[0]), strict=True):
        innocent, guilty = program
        assert passed(innocent)
        assert guilty["findings"] == [["logic.this_dtype", subject]]
        assert [guilty["located"][0][1], line in guilty["located"][0][2]] == [op, True]


@pytest.mark.slow
@pytest.mark.ci_sample
def test_the_operator_is_found_on_one_rank_alone(tmp_path: Path) -> None:
    faults = {
        "aten.tanh.default": ("output[0]", "torch.tanh(total * 0.5)"),
        "aten.tanh_backward.default": ("sent[backward all_reduce_0]", "torch.tanh(total * 0.5)"),
    }
    given = {"localize": True, "steps": 1}
    programs = ran(tmp_path, ("sharded", given), *(("sharded", {**given, "fault": fault}) for fault in faults))
    for told in (*programs[0], *(innocent for innocent, _ in programs[1:])):
        assert passed(told)
    for (op, (subject, line)), (_, guilty) in zip(faults.items(), programs[1:], strict=True):
        [own] = [found for found in guilty["located"] if found[0] == subject]
        assert own[1] == op
        assert line in own[2]
        assert guilty["evidence"][0]["reduced"].startswith("to 1 call on 1 input")


@pytest.mark.process
def test_exchanges_in_another_form_are_told_and_accuse_nobody(wrong: list[list[Any]]) -> None:
    for told in wrong[5]:
        assert told["verdict"] == "inconclusive", told["text"]
        assert any("exchanges tensors in another way than eager" in reason for _, reason, _ in told["skips"])


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.inductor
def test_inductor_agrees_with_eager_in_several_ranks(tmp_path: Path) -> None:
    given = {"compiler": "inductor", "steps": 3}
    programs = ran(
        tmp_path,
        ("alike", {"kind": "tensor parallel", **given}),
        ("alike", {"kind": "ddp", **given}),
        ("exchanging", {"compiler": "inductor"}),
    )
    for told in programs[0] + programs[1]:
        assert passed(told)
        assert told["equal"]
    for told in programs[2]:
        assert passed(told)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_fifty_checked_steps_leave_the_same_weights(world: int, tmp_path: Path) -> None:
    kinds = ("tensor parallel", "ddp", "fsdp")
    programs = ran(tmp_path, *(("alike", {"kind": kind, "steps": 50}) for kind in kinds), world=world, limit=540)
    for told in [told for program in programs for told in program]:
        assert passed(told)
        assert told["equal"]


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_rank_that_is_killed_ends_the_others_with_what_torch_raises(tmp_path: Path) -> None:
    survivor, killed = run_ranks("tests.support.rank_programs:killed", tmp_path)
    assert killed.code == -9
    assert survivor.code == 1
    assert "RuntimeError" in survivor.output
    assert "DivergenceError" not in survivor.output
    assert not list(tmp_path.glob("checked_backend_reports/*"))
