"""What a finding is about, read from its text and written as a key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checked_backend.findings import Finding, Kind
from checked_backend.subjects import Subject, SubjectKind


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("output[0]", SubjectKind.OUTPUT, "0"),
        ("output", SubjectKind.OUTPUT, "output"),
        ("output['a'][1]", SubjectKind.OUTPUT, "'a'][1"),
        ("grad[layer.weight]", SubjectKind.GRADIENT, "layer.weight"),
        ("param[layer.weight]", SubjectKind.PARAMETER, "layer.weight"),
        ("state[grad_mode]", SubjectKind.STATE, "grad_mode"),
        ("node[body: relu_3]", SubjectKind.NODE, "body: relu_3"),
        ("outputs", SubjectKind.OTHER, "outputs"),
        ("gradient of output[0]", SubjectKind.OTHER, "0"),
        ("rng state", SubjectKind.OTHER, "rng state"),
        ("", SubjectKind.OTHER, ""),
    ],
)
def test_a_subject_is_read_from_its_text(text: str, kind: SubjectKind, name: str) -> None:
    assert (Subject(text).kind, Subject(text).name) == (kind, name)
    assert Finding(Kind.LOGIC, text, "").about == Subject(text)


@given(st.text(), st.none() | st.integers(0))
def test_keys_name_the_step_and_are_read_back(text: str, step: int | None) -> None:
    subject = Subject(text, step)
    if step is not None:
        assert Subject.of(subject.key) == subject
    assert Subject.of("3:output[0]") == Subject("output[0]", 3)
    assert Subject.of("output[0]") == Subject("output[0]")


def test_what_a_program_writes_to() -> None:
    changed = {kind for kind in SubjectKind if kind.is_changed_in_place}
    assert changed == {SubjectKind.MUTATED, SubjectKind.PARAMETER, SubjectKind.BUFFER, SubjectKind.ATTRIBUTE}
