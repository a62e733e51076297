from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

import checked_backend
from checked_backend.errors import OptionError
from checked_backend.findings import DETAILS, Kind
from checked_backend.numerics.structure import StructureAspect
from checked_backend.options import AotOptions, CheckOptions, InterpreterOptions, MetadataCheck, parse_options
from checked_backend.regions.process_state import _SETTINGS


def test_all_is_checked_of_all_graphs_by_default() -> None:
    options = parse_options(InterpreterOptions, "debug_interpreter", None)
    assert (options.checks, options.graphs) == (get_args(MetadataCheck), ("forward", "backward", "inference"))


def test_unknown_key_lists_the_valid_ones() -> None:
    with pytest.raises(OptionError) as caught:
        parse_options(AotOptions, "nop", {"partitions": "default"})
    assert str(caught.value) == (
        "backend 'nop' has no option 'partitions'. Did you mean 'partition'? "
        "Valid options: decompositions, dump, dump_values, partition, report_dir."
    )


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("on_divergence", "explode", "'raise', 'warn', 'record' or 'fallback'"),
        ("every", 0, "greater than or equal to 1"),
        ("every", "often", "valid integer"),
        ("budget", 2, "less than or equal to 1"),
        ("reference", "drop", "'keep' or 'recompute'"),
        ("gradients", "perhaps", "valid boolean"),
        ("compiler", "numcheck", "cannot check itself"),
        ("compiler", 3, "valid string"),
        ("compiler_options", 3, "valid dictionary"),
        ("report_dir", 3, "path"),
    ],
)
def test_bad_value_names_key_value_and_what_is_valid(key: str, value: object, valid: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options(CheckOptions, "numcheck", {key: value})
    text = str(caught.value)
    assert text.startswith(f"backend 'numcheck': option {key!r} got {value!r}: ")
    assert valid in text
    assert "\n" not in text


def test_a_word_that_is_near_nothing_has_no_suggestion() -> None:
    with pytest.raises(OptionError) as caught:
        parse_options(AotOptions, "nop", {"zzz": 1})
    assert "Did you mean" not in str(caught.value)


def test_budget_and_every_exclude_each_other() -> None:
    with pytest.raises(OptionError, match="'budget' and 'every' exclude each other"):
        parse_options(CheckOptions, "numcheck", {"budget": 0.1, "every": 2})
    assert parse_options(CheckOptions, "numcheck", {"budget": None, "every": 2}).every == 2


def test_every_bad_value_is_reported() -> None:
    with pytest.raises(OptionError) as caught:
        parse_options(CheckOptions, "numcheck", {"every": -1, "reference": "drop"})
    assert len(str(caught.value).splitlines()) == 2


def test_interpreter_does_not_fall_back() -> None:
    with pytest.raises(OptionError, match="'raise', 'warn' or 'record'"):
        parse_options(InterpreterOptions, "debug_interpreter", {"on_divergence": "fallback"})


def test_precedence_is_argument_environment_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_options(CheckOptions, "numcheck", None).every == 1
    monkeypatch.setenv("CHECKED_BACKEND_EVERY", "")
    assert parse_options(CheckOptions, "numcheck", None).every == 1
    monkeypatch.setenv("CHECKED_BACKEND_EVERY", "7")
    assert parse_options(CheckOptions, "numcheck", None).every == 7
    assert parse_options(CheckOptions, "numcheck", {"every": 3}).every == 3


def test_environment_is_parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHECKED_BACKEND_IGNORE", "structure.stride, alias")
    monkeypatch.setenv("CHECKED_BACKEND_GRADIENTS", "0")
    monkeypatch.setenv("CHECKED_BACKEND_COMPILER_OPTIONS", '{"max_autotune": true}')
    monkeypatch.setenv("CHECKED_BACKEND_REPORT_DIR", str(tmp_path))
    options = parse_options(CheckOptions, "numcheck", {})
    assert options.ignore == ("structure.stride", "alias")
    assert options.gradients is False
    assert (options.compiler_options, options.report_dir) == ({"max_autotune": True}, tmp_path)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ON_DIVERGENCE": "explode"}, "environment variable CHECKED_BACKEND_ON_DIVERGENCE got 'explode'"),
        ({"EVRY": "7"}, r"_EVRY is not an option\. Did you mean 'CHECKED_BACKEND_EVERY'\? Valid.*_GRAD"),
        ({"IGNORE": "alais"}, r"CHECKED_BACKEND_IGNORE got 'alais'.*Did you mean 'alias'"),
        ({"EVERY": "7", "BUDGET": "0.1"}, "exclude each other"),
    ],
)
def test_a_slip_in_the_environment_is_refused(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"CHECKED_BACKEND_{name}", value)
    with pytest.raises(OptionError, match=message):
        parse_options(CheckOptions, "numcheck", {})


def test_a_variable_of_another_backend_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKED_BACKEND_EVERY", "7")
    monkeypatch.setenv("CHECKED_BACKEND_PARTITION", "default")
    assert parse_options(AotOptions, "nop", None).partition == "default"
    assert parse_options(CheckOptions, "numcheck", None).every == 7


def test_options_are_frozen_and_the_given_mapping_is_left_alone() -> None:
    given = {"every": 2}
    options = parse_options(CheckOptions, "numcheck", given)
    assert given == {"every": 2}
    with pytest.raises(ValueError, match="frozen"):
        options.every = 3  # type: ignore[misc]


def test_a_compiler_can_be_a_callable() -> None:
    def compiler(gm: object, _inputs: object) -> object:
        return gm

    assert parse_options(CheckOptions, "numcheck", {"compiler": compiler}).compiler is compiler


@pytest.mark.parametrize("cls", [CheckOptions, InterpreterOptions])
@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("structure.strid", "Did you mean 'structure.stride'?"),
        ("structur", "Did you mean 'structure'?"),
        ("strides", "is neither a kind of finding nor a subject"),
        ("alias.identitty", "Did you mean 'alias.identity'?"),
        ("outptu[0]", "Did you mean 'output[0]'?"),
        ("logic.", "is no finer kind"),
        ("nonfinite.nan", "There are: nonfinite.other_run"),
        ("LOGIC", "is neither a kind"),
    ],
)
def test_an_unknown_name_in_ignore_is_refused(cls: type[CheckOptions], entry: str, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options(cls, "numcheck", {"ignore": ("logic", entry)})
    assert str(caught.value).startswith(f"backend 'numcheck': option 'ignore' got ('logic', {entry!r}): {entry!r} is n")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    ["logic", "structure.stride", "mutation.grad_mode", "output[0]", "output['loss']", "grad[a.b]",
     "node[x, in cond: y]", "rng state", "gradient of output[0]", "sent[all_reduce_0]", "state[grad_mode]",
     "optimizer[w.exp_avg]"],
)  # fmt: skip
def test_kinds_and_subjects_may_be_ignored(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_options(CheckOptions, "numcheck", {"ignore": (entry,)}).ignore == (entry,)
    monkeypatch.setenv("CHECKED_BACKEND_IGNORE", f"{entry},rng")
    assert parse_options(CheckOptions, "numcheck", {}).ignore == (entry, "rng")


def test_what_the_code_says_comes_before_a_conflicting_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKED_BACKEND_EVERY", "7")
    monkeypatch.setenv("CHECKED_BACKEND_BUDGET", "0.1")
    sampled = parse_options(CheckOptions, "numcheck", {"every": 3})
    assert (sampled.every, sampled.budget) == (3, None)
    earned = parse_options(CheckOptions, "numcheck", {"budget": 0.2})
    assert (earned.every, earned.budget) == (1, 0.2)


FINER_KIND = re.compile(rf"({'|'.join(kind.value for kind in Kind)})\.[a-z_]+")


@pytest.mark.more
def test_every_finer_kind_that_the_package_uses_may_be_ignored() -> None:
    used = {
        node.value
        for path in Path(checked_backend.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and FINER_KIND.fullmatch(node.value)
    }
    made = {f"structure.{aspect}" for aspect in get_args(StructureAspect)}
    made |= {f"structure.{what}" for what in get_args(MetadataCheck)} - {
        f"structure.{what}" for what in ("structure", "alias", "mutation")
    }
    made |= {f"mutation.{setting.name.partition('.')[0]}" for setting in _SETTINGS}
    assert used | made <= DETAILS
    assert {"structure.stride", "logic.ranks", "rng.mask"} <= used
