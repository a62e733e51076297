"""Rules: what they do, and what their errors say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checked_backend.errors import SuiteError
from checked_backend.runs.case import Case
from checked_backend.sweep.rules import Rules, Settings, load_rules, matches

CASE = Case("torchbench", "resnet", "training", "float16", "cpu", "inductor")


def rules(folder: Path, text: str) -> Rules:
    path = folder / "own.yaml"
    path.write_text(f"version: 1\nrules:\n{text}")
    return load_rules([path])


def test_the_rules_that_come_with_this_are_valid_and_skip_with_a_reason() -> None:
    shipped = load_rules([])
    assert len(shipped.rules) > 5
    assert "CUDA" in (shipped.apply(replace(CASE, model="sam_fast"), Settings()).skip or "")
    assert shipped.apply(replace(CASE, model="sam_fast", device="cuda"), Settings()).skip is None
    assert shipped.apply(CASE, Settings()) == Settings()


def test_every_action(tmp_path: Path) -> None:
    found = rules(
        tmp_path,
        """
- models: [res*, other]
  suite: torchbench
  when: {mode: training, dtype: [float16, bfloat16], device: cpu, compiler: inductor, dynamic: false}
  batch_size: 4
  timeout: 3600
  run_as: amp
  ignore_outputs: ["output[1]", "grad[*]"]
  known_fails: [logic, alias]
  noise: {"output[0]": 0.01}
  slow: true
  non_deterministic: true
  control_flow: true
  reason: because
""",
    ).apply(CASE, Settings())
    assert (found.batch_size, found.timeout, found.run_as) == (4, 3600.0, "amp")
    assert found.ignore_outputs == {"output[1]": "because", "grad[*]": "because"}
    assert found.known_fails == {"logic": "because", "alias": "because"}
    assert found.noise == {"output[0]": (0.01, "because")}
    assert found.tags == dict.fromkeys(("slow", "non_deterministic", "control_flow"), "because")


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "vgg"},
        {"suite": "timm"},
        {"mode": "inference"},
        {"dtype": "float32"},
        {"device": "cuda"},
        {"compiler": "eager"},
        {"dynamic": True},
    ],
)
def test_a_rule_is_for_no_other_case(tmp_path: Path, changed: dict[str, object]) -> None:
    found = rules(
        tmp_path,
        "- {models: res*, suite: torchbench, skip: true, reason: x, when: "
        "{mode: training, dtype: float16, device: cpu, compiler: inductor, dynamic: false}}",
    )
    assert found.apply(CASE, Settings()).skip == "x"
    assert found.apply(replace(CASE, **changed), Settings()).skip is None


def test_a_later_rule_has_the_last_word_and_a_user_can_take_a_skip_back(tmp_path: Path) -> None:
    found = rules(
        tmp_path, "- {models: sam_fast, skip: false, reason: ours runs}\n- {models: '*', slow: false, reason: x}"
    )
    assert found.apply(replace(CASE, model="sam_fast"), Settings()).skip is None
    assert found.apply(replace(CASE, model="demucs"), Settings()).tags == {}


def test_brackets_of_a_name_are_no_pattern_and_lists_may_be_aliases(tmp_path: Path) -> None:
    found = rules(
        tmp_path, "- {models: &m ['a[0]', [b]], skip: true, reason: x}\n- {models: [*m, c], slow: true, reason: y}"
    )
    assert found.apply(replace(CASE, model="a[0]"), Settings()).skip == "x"
    assert found.apply(replace(CASE, model="a0"), Settings()).skip is None
    assert found.apply(replace(CASE, model="b"), Settings()).tags == {"slow": "y"}


@pytest.mark.parametrize(
    ("rule", "line", "why"),
    [
        ("- models: a\n  skip: true\n", 3, "'reason' is missing"),
        ("- skip: true\n  reason: x\n", 3, "'models' is missing"),
        ("- models: a\n  reason: x\n", 3, "a rule: a rule that does nothing; expected one of skip, batch_size"),
        ("- models: a\n  reason: x\n  skp: true\n", 5, "there is no 'skp'; expected models, suite"),
        ("- models: a\n  reason: x\n  skip: maybe\n", 5, "skip got 'maybe': Input should be a valid boolean"),
        ("- models: a\n  reason: x\n  batch_size: 0\n", 5, "batch_size got 0: Input should be greater than 0"),
        ("- models: a\n  reason: x\n  batch_size: true\n", 5, "batch_size got True: "),
        ("- models: a\n  reason: x\n  timeout: -1\n", 5, "timeout got -1: "),
        (f"- models: a\n  reason: x\n  timeout: 1{'0' * 400}\n", 5, "timeout got 1000"),
        ("- models: a\n  reason: x\n  run_as: int8\n", 5, "run_as got 'int8': Input should be 'float32'"),
        ("- models: a\n  reason: x\n  noise: 7\n", 5, "noise got 7: Input should be less than 1"),
        ("- models: a\n  reason: x\n  noise:\n    o: no\n", 6, "o got False: "),
        ("- models: a\n  reason: x\n  known_fails: wrong\n", 5, "known_fails got 'wrong': expected kinds of"),
        ("- models: a\n  reason: x\n  known_fails: true\n", 5, "known_fails got True: "),
        ("- models: a\n  reason: x\n  slow: 1\n", 5, "slow got 1: Input should be a valid boolean"),
        ("- models: a\n  reason: x\n  skip: true\n  when: {mode: train}\n", 6, "mode got 'train': Input should be"),
        ("- models: a\n  reason: x\n  skip: true\n  when:\n    phase: a\n", 7, "there is no 'phase'; expected mode, "),
        ("- models: a\n  reason: x\n  skip: true\n  when: {dynamic: 1}\n", 6, "dynamic got 1: "),
        ("- models: [1]\n  reason: x\n  skip: true\n", 3, "models got 1: Input should be a valid string"),
        ("- models: a\n  reason: ''\n  skip: true\n", 4, "reason got ''"),
        ("- models: a\n  reason: x\n  skip: true\n  suite: tim\n", 6, "suite got 'tim': Input should be 'torchbench'"),
        ("- nonsense\n", 3, "a rule got 'nonsense': "),
        ("- models: a\n  models: b\n", 4, "'models' stands twice"),
        ("- {models: !!python/object/apply:os.system ['true']}\n", 3, "got the tag tag:yaml.org,2002:python"),
        ("- {models: !own x}\n", 3, "got the tag !own; expected plain data"),
        ("- {1: x}\n", 3, "a key that is no text"),
        ("- [1,\nc: 2\n", 5, "not YAML"),
        ("- {models: &x [*x], skip: true, reason: x}\n", 3, "models: lists within lists within lists"),
    ],
)
def test_errors_name_file_line_and_what_was_expected(tmp_path: Path, rule: str, line: int, why: str) -> None:
    with pytest.raises(SuiteError) as caught:
        rules(tmp_path, rule)
    assert str(caught.value).startswith(f"{tmp_path / 'own.yaml'}:{line}: {why}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"rules: []\n", ":1: 'version' is missing"),
        (b"version: 2\n", ":1: version got 2: Input should be 1"),
        (b"version: 1\nrules: {a: b}\n", ":2: rules: Input should be a valid list"),
        (b"- x\n", ":1: the file: "),
        (b"", ":1: there is nothing in it; expected version and rules"),
        (b"version: !!int zwei\n", ": not YAML: "),
        (b"\xff\xfe\x00", ": not UTF-8"),
        (b"[" * 5000, ":"),
        (b"#" * 2**23, ": larger than 4 MiB"),
    ],
)
def test_errors_of_the_whole_file(tmp_path: Path, text: bytes, why: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_bytes(text)
    with pytest.raises(SuiteError) as caught:
        load_rules([path])
    assert str(caught.value).startswith(f"{path}{why}")
    with pytest.raises(SuiteError, match="cannot be read: No such file"):
        load_rules([tmp_path / "none.yaml"])


def test_aliases_that_multiply_end_and_dates_are_text(tmp_path: Path) -> None:
    lists = ["&a0 [x" + ", x" * 19 + "]", *(f"&a{n} [*a{n - 1}{f', *a{n - 1}' * 19}]" for n in range(1, 9))]
    text = "\n".join(f"- {{models: {names}, slow: true, reason: x}}" for names in lists)
    with pytest.raises(SuiteError, match=r"own\.yaml:6: models: lists within lists within lists"):
        rules(tmp_path, text)
    found = rules(tmp_path, "- {models: 2024-01-02, slow: true, reason: x}")
    assert found.apply(replace(CASE, model="2024-01-02"), Settings()).tags == {"slow": "x"}


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a", ["a"], ["", "ab", "ba"]),
        ("a*", ["a", "ab", "a\nb"], ["ba"]),
        ("*a*b", ["ab", "xaxb", "aab"], ["ba", "a", "abx"]),
        ("a*a", ["aa", "aba"], ["a"]),
        ("b[0]*", ["b[0]", "b[0]x"], ["b0"]),
        ("a?[!b]", ["a?[!b]"], ["aa[!b]", "a?c"]),
        ("*", ["", "x"], []),
    ],
)
def test_only_a_star_is_special(pattern: str, matching: list[str], others: list[str]) -> None:
    assert all(matches(pattern, name) for name in matching)
    assert not any(matches(pattern, name) for name in others)


def test_many_stars_take_no_time() -> None:
    assert not matches("*a" * 30 + "*b", "a" * 2000)
