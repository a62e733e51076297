"""YAML with lines, of strangers."""

from __future__ import annotations

from pathlib import Path

import pytest

from checked_backend.errors import SuiteError
from checked_backend.sweep.lines import load_lined


def load(folder: Path, text: str) -> object:
    path = folder / "rules.yaml"
    path.write_text(text)
    return load_lined(path)


def test_every_value_knows_its_line(tmp_path: Path) -> None:
    found = load(tmp_path, "a: 1\nb:\n  - x\n  - 2024-01-02\n")
    assert found.value["a"].line == 1
    assert [entry.line for entry in found.value["b"].value] == [3, 4]
    assert found.value["b"].value[1].value == "2024-01-02"


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("a: 1\nb: [1,\nc: 2\n", 4, "not YAML"),
        ("a: 1\na: 2\n", 2, "'a' stands twice"),
        ("a: !!python/object/apply:os.system ['true']\n", 1, "the tag tag:yaml.org,2002:python"),
        ("a: !own x\n", 1, "the tag !own"),
        ("1: x\n", 1, "a key got 1; expected text"),
        ("a: &x [*x]\n", 1, "does an alias stand within what it names?"),
        ("a: !!int zwei\n", 1, "is no int"),
    ],
)
def test_what_is_no_plain_data_is_refused_with_its_line(tmp_path: Path, text: str, line: int, why: str) -> None:
    with pytest.raises(SuiteError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'rules.yaml'}:{line}: ")
    assert why in str(caught.value)


def test_aliases_that_multiply_end(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(SuiteError, match="counting what aliases repeat"):
        load(tmp_path, "\n".join(lines))


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="cannot be read: No such file"):
        load_lined(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SuiteError, match="not UTF-8"):
        load_lined(tmp_path / "bytes.yaml")
    with pytest.raises(SuiteError, match=r":1: not YAML|nested too deeply"):
        load(tmp_path, "[" * 5000)
