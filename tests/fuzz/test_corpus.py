"""The corpus keeps programs, results and groups, and refuses what is none."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from checked_backend.errors import CheckedBackendError, FuzzError
from checked_backend.fuzz.corpus import Corpus, Entry
from checked_backend.fuzz.program import encode_program
from checked_backend.fuzz.results import ProgramResult
from checked_backend.runs.case import Status
from tests.support.fuzz_tools import PASS, entry_of, failing, filled, group_of, program_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "f"


def _made(path: Path) -> Corpus:
    corpus = Corpus(path, write=True)
    corpus.settle({"compiler": "inductor"})
    return corpus


def _state(corpus: Corpus) -> Any:
    return corpus.failures(), corpus.groups(), corpus.checked, corpus.unconfirmed(), corpus.inconclusive()


def _missing(corpus: Corpus, seed: int) -> list[int]:
    return list(islice(corpus.missing(seed, {3}), 3))


def test_what_was_written_is_there_again(path: Path) -> None:
    with _made(path) as corpus:
        _, second = filled(corpus, ("torch.exp", PASS), ("torch.neg", failing()))
        corpus.add([Entry(0, 5, "", ProgramResult(Status.SKIPPED, "streams"))])
        assert corpus.failures() == [second]
        corpus.put(group_of("torch.neg"), second)
        state = _state(corpus)
    with Corpus(path) as corpus:
        assert _state(corpus) == state
        assert not corpus.failures()
        assert _missing(corpus, 0) == [2, 4, 6]
        assert _missing(corpus, 1) == [0, 1, 2]
        assert (len(corpus.checked), corpus.compiled, corpus.ops) == (2, 2, 2)
        assert corpus.left_out() == {"streams": 1}
        assert corpus.groups() == [replace(group_of("torch.neg"), met=1, number=1)]


def test_any_number_of_its_last_files_may_be_missing(path: Path) -> None:
    """As after a kill at any moment: what is there is as it was then, and what is missing can be done again."""
    states = []
    with _made(path) as corpus:
        other = group_of("torch.exp", "torch.neg")
        programs = [
            program_of(*ops) for ops in (["torch.neg"], ["torch.neg"], ["torch.exp", "torch.neg"], ["torch.abs"])
        ]
        entries = [entry_of(number, program, failing()) for number, program in enumerate(programs)]
        for step in (
            lambda: corpus.add(entries),
            lambda: corpus.put(group_of("torch.neg"), entries[0]),
            lambda: corpus.assign(entries[1], group_of("torch.neg").signature),
            lambda: corpus.put(other, entries[2]),
            lambda: corpus.assign(entries[3], ""),
            lambda: corpus.put(replace(other, op="neg", localized=True), was=other.signature),
        ):
            states.append(_state(corpus))
            step()
        assert [(group.op, group.met, group.number) for group in corpus.groups()] == [("neg", 3, 1)]
        assert [name for name, _ in corpus.unconfirmed()] == [entries[3].name]
    for state in reversed(states):
        sorted(path.glob("0*.json"))[-1].unlink()
        with Corpus(path) as corpus:
            assert _state(corpus) == state


def test_a_group_keeps_its_smallest_program(path: Path) -> None:
    with _made(path) as corpus:
        first, second = filled(corpus, ("torch.neg", failing()), ("torch.neg", failing()))
        corpus.put(replace(group_of("torch.neg"), text=encode_program(program_of("torch.neg", "torch.neg"))), first)
        corpus.put(group_of("Tensor.neg_"), second)
        (group,) = corpus.groups()
        assert (group.met, group.program) == (2, program_of("Tensor.neg_"))


def test_another_compiler_is_refused(path: Path) -> None:
    with _made(path) as corpus:
        corpus.settle({"compiler": "inductor"})
        with pytest.raises(FuzzError, match="begun with compiler 'inductor', not 'eager'; give another --out"):
            corpus.settle({"compiler": "eager"})


def test_a_second_writer_is_refused(path: Path) -> None:
    with Corpus(path, write=True), pytest.raises(CheckedBackendError, match="give another --out"):
        Corpus(path, write=True)


def test_what_is_no_folder_of_fuzz_is_refused(path: Path) -> None:
    with pytest.raises(CheckedBackendError, match="not the folder of a fuzz"):
        Corpus(path)
    path.mkdir()
    (path / "sweep.json").write_text("{}")
    with pytest.raises(CheckedBackendError, match="not the folder of a fuzz"):
        Corpus(path, write=True)


_EVIL = "evil\n\x1b[31mPASS"


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("group", []),
        ("group.confirmed", {}),
        ("group.met", _EVIL),
        ("group.result.status", _EVIL),
        ("group.result.seconds", "1"),
        ("programs", [{"seed": _EVIL, "number": 0, "text": "", "result": {"status": "pass"}}]),
        ("programs", [{"seed": 10**400, "number": 0, "text": "", "result": {"status": "pass"}}]),
        ("step", None),
        *(
            ("group.text", json.dumps({**json.loads(encode_program(program_of("torch.neg"))), "calls": [call]}))
            for call in (
                ["getitem", [], {}],
                ["setitem", [{"v": 0}], {}],
                ["+=", [{"v": 0}], {}],
                ["+", [{"v": 0}, 1, 2], {}],
                ["Tensor.add", [], {}],
            )
        ),
    ],
)
def test_a_file_that_is_no_record_counts_as_nothing_and_is_told(path: Path, where: str, value: Any) -> None:
    with _made(path) as corpus:
        corpus.put(group_of("torch.neg"))
    file = sorted(path.glob("0*.json"))[-1]
    raw = part = json.loads(file.read_text())
    *names, last = where.split(".")
    for name in names:
        part = part[name]
    part[last] = value
    file.write_text(json.dumps(raw))
    with Corpus(path) as corpus:
        (why,) = corpus.damaged
        assert not corpus.groups()
    assert why.startswith(f"{file}: ")
    assert "\x1b" not in why
    with Corpus(path, write=True) as corpus:
        assert file.with_name(f"{file.name}.damaged").exists()


def test_brackets_without_end_are_refused(path: Path) -> None:
    with _made(path) as corpus:
        corpus.put(group_of("torch.neg"))
    sorted(path.glob("0*.json"))[-1].write_text("[" * 5000)
    with Corpus(path) as corpus:
        assert len(corpus.damaged) == 1
