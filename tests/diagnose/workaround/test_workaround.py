"""Which setting is found, with compilers that heed the settings they are given."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.traceback import annotate

from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.inductor import heeds_annotations, inductor_graph_passes, inductor_settings
from checked_backend.diagnose.workaround.line import keep_line_out, keep_out, keep_unfused, unfused, without_line
from checked_backend.diagnose.workaround.search import (
    SettingSearch,
    cheap,
    costly,
    find_workaround,
    in_eager,
    pass_or_operator,
)
from checked_backend.diagnose.workaround.settings import (
    COSTLY,
    EAGER,
    PASSES,
    PROCESS,
    SETTINGS,
    STRICT,
    Setting,
    applicable,
    operator_fallbacks,
    pass_settings,
    taken_back,
)
from checked_backend.findings import Finding, Kind
from checked_backend.graphs.source_line import source_line
from checked_backend.options import CheckOptions
from checked_backend.process.worker import run_in_worker
from checked_backend.regions.compile import resolve_compiler
from checked_backend.regions.graph_case import GraphCase
from tests.support.planted import planted
from tests.support.reduce_tools import case_of

aten = torch.ops.aten

CASE = case_of(lambda x: (aten.relu.default(x),), torch.ones(2), compiler="inductor")
WRONG = (Finding(Kind.LOGIC, "output[0]", "wrong"),)
EVERY = (*STRICT, *SETTINGS, *PASSES, *COSTLY, *EAGER)


def right_if(condition: Callable[[Mapping[str, Any]], bool], tried: list[Mapping[str, Any]]) -> Any:
    def oracle(case: GraphCase, _timeout: float) -> tuple[Finding, ...]:
        tried.append(case.options.compiler_options)
        plain = case.options.compiler == "inductor"
        return () if plain and condition(case.options.compiler_options) else WRONG

    return oracle


def found_by(oracle: Any, seconds: float = 300.0) -> Setting | None:
    """Cheap settings, then costly ones."""
    deadline = time.monotonic() + seconds
    steps = (cheap, pass_or_operator, costly, in_eager)
    found = (find_workaround(CASE, step, deadline=deadline, oracle=oracle) for step in steps)
    return next((setting for setting in found if setting is not None), None)


@pytest.mark.process
@pytest.mark.parametrize("patches", [{"pattern_matcher": False}, {"layout_optimization": False}, {"cpp.simdlen": 1}])
def test_the_one_setting_that_helps_is_found(patches: dict[str, Any]) -> None:
    tried: list[Mapping[str, Any]] = []
    oracle = right_if(lambda options: patches.items() <= options.items(), tried)
    assert found_by(oracle).code_with({}).endswith(f"\nmodel = torch.compile(model, options={patches!r})")
    assert len(tried) <= 10


@pytest.mark.process
def test_none_is_found_where_none_helps_or_there_is_no_time_or_the_compiler_has_none() -> None:
    tried: list[Mapping[str, Any]] = []
    assert found_by(right_if(lambda options: False, tried)) is None
    # strict ones, cheap ones together, passes together, the operator's fallback, the costly ones
    assert len(tried) <= len(STRICT) + 3 + len((*COSTLY, *EAGER))
    always = right_if(lambda options: True, tried)
    assert found_by(always, seconds=0) is None
    other = case_of(lambda x: (aten.relu.default(x),), torch.ones(2))
    assert find_workaround(other, cheap, deadline=time.monotonic() + 300, oracle=always) is None


@pytest.mark.process
def test_what_helps_the_small_program_must_help_the_region() -> None:
    tried: list[Mapping[str, Any]] = []
    asked: list[str] = []

    def confirmed(setting: Setting) -> bool:
        asked.append(code := setting.code_with({}))
        return "reorder_for_peak_memory" in code

    def some(search: SettingSearch) -> Setting | None:
        return search.one_of(SETTINGS[-14:])

    oracle = right_if(bool, tried)
    found = find_workaround(CASE, some, deadline=time.monotonic() + 300, confirm=confirmed, oracle=oracle)
    assert found is None  # none of those is the one
    assert len(asked) == len(set(asked)) > 3  # each was tried on the region, once
    found = find_workaround(CASE, cheap, deadline=time.monotonic() + 300, confirm=confirmed, oracle=oracle)
    assert "reorder_for_peak_memory" in found.code_with({})


@pytest.mark.process
def test_settings_that_help_only_together_are_found_together() -> None:
    tried: list[Mapping[str, Any]] = []
    both = {"layout_optimization": False, "inplace_buffers": False}
    oracle = right_if(lambda options: both.items() <= options.items(), tried)
    found = find_workaround(CASE, cheap, deadline=time.monotonic() + 300, oracle=oracle)
    assert found.code_with({}).endswith(f"\nmodel = torch.compile(model, options={both!r})")
    assert len(tried) <= 15


@pytest.mark.inductor
def test_what_a_setting_changes_in_the_process_is_taken_back() -> None:
    from torch._inductor import decomposition, lowering

    op = aten.gelu.default
    flag = torch.backends.cuda.matmul.allow_tf32
    flags = Setting("flag", flags={"backends.cuda.matmul.allow_tf32": not flag})
    before = (dict(decomposition.decompositions), dict(lowering.lowerings), set(lowering.fallbacks))
    for setting in (Setting("fallback", fallback=op), flags):
        compiled = torch.compile(torch.nn.functional.gelu, backend=setting.on(CASE.options).compiler)
        with pytest.raises(RuntimeError, match="wrong"), taken_back(setting):
            raise RuntimeError("wrong", compiled(torch.ones(3)))
    assert (decomposition.decompositions, lowering.lowerings, set(lowering.fallbacks)) == before
    assert torch.backends.cuda.matmul.allow_tf32 is flag


def test_the_table_names_settings_that_exist() -> None:
    present = inductor_settings()
    unknown = {key for setting in EVERY for key in setting.patches} - present.keys()
    # what another version of Inductor has is left out, not tried
    assert all(setting.patches.keys() <= present.keys() for setting in applicable(EVERY, CASE))
    assert len(unknown) <= 6


def test_the_last_resort_can_be_pasted() -> None:
    code = keep_out("aten.relu.default", "model.py:4 in forward: x = x.relu()")
    names: dict[str, Any] = {}
    exec(code, names)
    assert torch.equal(names["eager_relu"](torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
    assert "model.py:4" in code


def test_the_last_resort_keeps_what_is_in_place_in_place() -> None:
    assert "disable(torch.Tensor.mul_)" in keep_out("aten.mul_.Tensor", None)
    assignment = keep_out("operator.setitem", None)
    assert "\neager_setitem = torch.compiler.disable(operator.setitem)" in assignment
    exec(assignment, {})
    assert "disable(torch.nn.functional.gelu)" in keep_out("torch.nn.functional.gelu", None)


@pytest.mark.process
def test_of_the_graph_passes_the_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = {"remove_noop_ops": [], "decompose_something": [], "wrong_pass": ["this", "that"], "pass_pattern_0": []}
    monkeypatch.setattr("checked_backend.diagnose.workaround.search._passes_of", lambda *_: passes)
    tried: list[Mapping[str, Any]] = []

    def right(options: Mapping[str, Any]) -> bool:
        passes = str(options.get("disabled_passes", ""))
        assert "decompose_something" not in passes  # Inductor cannot do without it
        return options.get("use_post_grad_passes") is False or "wrong_pass" in passes.split(",")

    found = find_workaround(CASE, pass_or_operator, deadline=time.monotonic() + 300, oracle=right_if(right, tried))
    assert found.code_with({}).endswith("\nmodel = torch.compile(model, options={'disabled_passes': 'wrong_pass'})")
    assert found.part == "graph pass wrong_pass (this and that)"
    given = CASE.options.model_copy(update={"compiler_options": {"disabled_passes": "mine"}})
    assert found.on(given).compiler_options == {"disabled_passes": "mine,wrong_pass"}


def test_operators_of_a_program_that_has_functions_are_those_that_they_call() -> None:
    graph = fx.symbolic_trace(lambda x: (torch.relu(torch.clamp(x, 1, 200)),))
    case = GraphCase(graph, (torch.zeros(3, dtype=torch.complex64),), CheckOptions(compiler="inductor"))
    assert [setting.fallback for setting in operator_fallbacks(case)] == [torch.ops.aten.clamp.default]  # it raises
    names = [str(setting.fallback) for setting in operator_fallbacks(replace(case, inputs=(torch.zeros(3),)))]
    assert names == ["aten.relu.default", "aten.clamp.default"]


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.inductor
def test_a_graph_pass_of_inductor_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.fx_passes import post_grad

    def spoils(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.relu.default):
            node.target = aten.abs.default

    monkeypatch.setattr(post_grad, "remove_assert_ops", spoils)
    case = case_of(lambda x: (aten.relu.default(x),), torch.tensor([-1.0, 2.0]), compiler="inductor")
    found = find_workaround(case, pass_or_operator, deadline=time.monotonic() + 600)
    assert found.code_with({}).endswith("= torch.compile(model, options={'disabled_passes': 'remove_assert_ops'})")


@pytest.mark.inductor
def test_of_a_graph_pass_it_is_noted_which_patterns_it_replaced() -> None:
    def twice_converted(x: torch.Tensor) -> torch.Tensor:
        return aten.relu.default(x.to(torch.float64).to(torch.float16))

    passes: dict[str, list[str]] = {}
    with without_compile_caches(), inductor_graph_passes(passes):
        torch.compile(twice_converted)(torch.ones(3))
    assert any("pointless_convert" in patterns for patterns in passes.values())
    noted = dict(passes)
    torch._dynamo.reset()
    with without_compile_caches():
        torch.compile(twice_converted)(torch.ones(3))
    assert passes == noted  # nothing is noted any more


@pytest.fixture
def with_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.process
@pytest.mark.usefixtures("with_tf32")
def test_settings_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "backends.cuda.matmul.allow_tf32"
    precise = Setting("no TF32", flags={name: False}, devices=("cpu",))
    monkeypatch.setattr(
        "checked_backend.diagnose.workaround.settings.resolve_compiler", lambda _options: lambda gm, _inputs: gm
    )

    def oracle(case: GraphCase, _timeout: float) -> tuple[Finding, ...]:
        if not callable(case.options.compiler):
            return WRONG

        def produce() -> str:
            assert callable(case.options.compiler)
            case.options.compiler(case.graph, ())
            return str(torch.backends.cuda.matmul.allow_tf32)

        return () if run_in_worker(produce, timeout=60) == "False" else WRONG

    view = case_of(lambda x: (aten.view.default(x, [2]),), torch.ones(2), compiler="inductor")
    monkeypatch.setattr("checked_backend.diagnose.workaround.search.PROCESS", (precise,))
    found = find_workaround(view, pass_or_operator, deadline=time.monotonic() + 300, oracle=oracle)
    assert found.code_with({}).endswith(f"\ntorch.{name} = False")
    assert torch.backends.cuda.matmul.allow_tf32  # here nothing has changed
    assert not applicable([Setting("", flags={name: True}, devices=("cpu",))], CASE)
    assert not applicable([Setting("", flags={name: False}, devices=("cuda",))], CASE)
    assert not applicable([Setting("", flags={"backends.none.such": False}, devices=("cpu",))], CASE)
    assert any(name in setting.flags for setting in PROCESS)


def test_a_line_can_be_left_to_eager() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        y = torch.relu(y) * 2
        return torch.cos(y)

    compiled_calls: list[list[str]] = []

    def compiler(gm: fx.GraphModule, _inputs: Any) -> Any:
        compiled_calls.append([node.name for node in gm.graph.nodes if node.op == "call_function"])
        return gm.forward

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        [line] = {source_line(node) for node in gm.graph.nodes if node.name == "relu"}
        assert line is not None
        return without_line(compiler, line)(gm, inputs)

    x = torch.randn(4)
    assert torch.equal(torch.compile(function, backend=backend)(x), function(x))
    assert compiled_calls == [["sin"], ["cos"]]
    torch._dynamo.reset()
    with pytest.raises(LookupError, match="no call from elsewhere"):
        without_line(compiler, "elsewhere")(CASE.graph, ())


@pytest.mark.parametrize(
    ("line", "signature", "call"),
    [
        ("y = torch.relu(x).sin()", "in_eager(x)", "y = in_eager(x)"),
        ("return self.last(F.relu(hidden)) * 2", "in_eager(self, hidden)", "return in_eager(self, hidden)"),
        ("x += helper(w)", "in_eager(helper, w, x)", "x = in_eager(helper, w, x)"),
        ("a, b = x.chunk(2)", "in_eager(x)", "a, b = in_eager(x)"),
        ("x.mul_(2)", "in_eager(x)", "in_eager(x)"),
        ("y = sum(t * k for t in parts)", "in_eager(k, parts)", "y = in_eager(k, parts)"),
        ("y = map(lambda t: t + z, x)", "in_eager(x, z)", "y = in_eager(x, z)"),
        ("return self.act(input)", "in_eager(input, self)", "return in_eager(input, self)"),
        ("y = input[id].sum() + max(x, len(x))", "in_eager(x, input, id)", "y = in_eager(x, input, id)"),
        ("y = x.to(float)", "in_eager(x)", "y = in_eager(x)"),
    ],
)
def test_a_line_becomes_a_function_that_can_be_called_in_its_place(line: str, signature: str, call: str) -> None:
    code = keep_line_out(f"model.py:4 in forward: {line}")
    exec(code, {})
    assert f"@torch.compiler.disable\ndef {signature}:\n    {line}\n" in f"{code}\n"
    assert code.endswith(f"# and at model.py:4 in forward: {call}")


def annotated(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    with annotate({"fallback_to_eager": True}):
        y = torch.tanh(y)
    return torch.cos(y)


def plain(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    y = torch.tanh(y)
    return torch.cos(y)


@pytest.mark.inductor
@pytest.mark.skipif(not heeds_annotations(), reason="this version of torch heeds no annotation")
def test_a_line_that_is_kept_out_of_fusion_is_eagers_in_both_directions() -> None:
    """What is tried, and what the user is told to write."""

    def only_that_line(gm: fx.GraphModule, inputs: Any) -> Any:
        [line] = {source_line(node) for node in gm.graph.nodes if node.name == "y_1"}
        assert line.endswith("in plain: y = torch.tanh(y)")
        return unfused(resolve_compiler(CASE.options), line)(gm, inputs)

    def all_lines(gm: fx.GraphModule, inputs: Any) -> Any:
        return unfused(resolve_compiler(CASE.options))(gm, inputs)

    def gradient(function: Callable[..., Any]) -> torch.Tensor:
        x = torch.linspace(-1, 1, 8, requires_grad=True)
        return torch.autograd.grad(function(x).sum(), x)[0]

    ways = [torch.compile(plain, backend=backend, fullgraph=True) for backend in (only_that_line, all_lines)]
    ways.append(torch.compile(annotated, fullgraph=True))
    with without_compile_caches(), planted("tanh"):
        assert not torch.allclose(gradient(torch.compile(plain)), gradient(plain))
        torch._dynamo.reset()
        for way in ways:
            torch.testing.assert_close(gradient(way), gradient(plain))


def test_a_line_that_the_region_lacks_cannot_be_kept_out_of_fusion() -> None:
    with pytest.raises(LookupError, match="no call from elsewhere"):
        unfused(lambda gm, _inputs: gm.forward, "elsewhere")(CASE.graph, ())


@pytest.mark.parametrize(
    ("source", "place", "inside"),
    [
        ("model.py:4 in forward: y = torch.tanh(x)", "model.py:4 in forward", "y = torch.tanh(x)"),
        ("model.py:4 in forward: return self.act(x)", "model.py:4 in forward", "return self.act(x)"),
        ("model.py:4 in forward: y = torch.tanh(", "model.py:4 in forward: y = torch.tanh(", "..."),
    ],
)
def test_code_that_keeps_a_line_out_of_fusion(source: str, place: str, inside: str) -> None:
    code = keep_unfused(source)
    assert ast.parse(code)
    assert f"\n# at {place}: eager's kernels, without a graph break\n" in code
    assert code.endswith(f"\nwith annotate({{'fallback_to_eager': True}}):\n    {inside}")
    assert f"torch.compiler.config.cache_key_tag = {f'{place} left to eager'!r}  #" in code  # its cache is blind to it


@pytest.mark.parametrize("line", ["torch.relu(", "if x.any():", "self.y = x.relu()", ""])
def test_a_line_that_is_no_whole_statement_is_left_to_the_user(line: str) -> None:
    code = keep_line_out(f"model.py:4 in forward: {line}")
    exec(code, {})
    assert "# move what stands at model.py:4 in forward" in code


def test_a_function_that_no_program_can_name_is_kept_out_with_its_line() -> None:
    code = keep_out("torch._C._linalg.linalg_cholesky", "model.py:4 in f: y = torch.linalg.cholesky(x)")
    exec(code, {})
    assert "def in_eager(x):\n    y = torch.linalg.cholesky(x)\n    return y" in code


@pytest.mark.process
def test_every_setting_can_be_pasted_into_a_fresh_process(tmp_path: Path) -> None:
    """With its imports, and with the names and values that this version of Inductor has."""
    codes = [setting.code_with({"max_autotune": False}) for setting in applicable(EVERY, CASE)]
    codes += [setting.code_with({}) for setting in (*operator_fallbacks(CASE), *pass_settings({"some_pass": []}))]
    codes += [setting.code_with({}) for setting in applicable(PROCESS, CASE)]
    script = tmp_path / "pasted.py"
    script.write_text(
        "import json, sys, warnings\nwarnings.simplefilter('ignore')\nfrom torch import nn\n"
        "for code in json.load(open(sys.argv[1])):\n    exec(code, {'model': nn.Identity()})\nprint('pasted')\n"
    )
    given = tmp_path / "codes.json"
    given.write_text(json.dumps(codes))
    done = subprocess.run([sys.executable, script, given], capture_output=True, text=True, timeout=300)
    assert done.stdout == "pasted\n", done.stderr
    assert len(codes) > 15


def test_what_the_program_hands_to_inductor_stays() -> None:
    def own_pass(_graph: fx.Graph) -> None: ...

    own = {"disabled_passes": "mine", "max_autotune": True, "post_grad_custom_pre_pass": own_pass}
    code = Setting("", {"disabled_passes": "wrong_pass"}).code_with(own)
    names: dict[str, Any] = {"torch": SimpleNamespace(compile=lambda model, options: options), "model": 1}
    exec(code.replace("import torch\n", ""), names)
    assert names["model"] == {"disabled_passes": "mine,wrong_pass", "max_autotune": True}
    assert "own = {}  # your own values of 'post_grad_custom_pre_pass' belong here" in code
