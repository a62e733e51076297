"""`Watch`: what stands in the place of ``torch.compile``, and that it goes again."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.program.compile_calls import CheckingBackend
from checked_backend.pytest_plugin.watch import Watch


def f(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def test_torch_compile_is_put_back() -> None:
    before, watch = torch.compile, Watch()
    with watch.test(None):
        assert torch.compile is before
    watch.check_everything("eager")
    watch.check_everything("aot_eager")  # the first counts
    assert torch.compile is not before
    with pytest.raises(ZeroDivisionError), watch.test(((), {"compiler": "aot_eager"})):
        _ = 1 / 0
    assert torch.compile is not before
    watch.close()
    assert torch.compile is before
    watch.close()
    with pytest.raises(ZeroDivisionError), watch.test(((), {})):
        _ = 1 / 0
    assert torch.compile is before


def test_two_watches_nest() -> None:
    before, outer, inner = torch.compile, Watch(), Watch()
    outer.check_everything("eager")
    inner.check_everything("eager")
    inner.close()
    assert torch.compile is not before
    outer.close()
    assert torch.compile is before


def test_what_was_compiled_works_on_after_the_end() -> None:
    watch = Watch()
    watch.check_everything("eager")
    with watch.test(None) as check:
        compiled = torch.compile(f)
        compiled(torch.ones(3))
    watch.close()
    assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin())
    assert check.verdict is cb.Verdict.PASS
    assert dict(check.properties())["numcheck.calls"] == "1"


def test_equal_backends_share_compiled_code() -> None:
    seen: list[int] = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        seen.append(1)
        return gm.forward

    with closing(Watch()) as watch:
        watch.check_everything("eager")
        for _ in range(2):
            torch.compile(f, backend=backend)(torch.ones(3))
    assert len(seen) == 1
    one, same = (CheckingBackend(watch, {"a": 1, "compiler": backend}, None) for _ in range(2))
    other = CheckingBackend(watch, {"a": 2, "compiler": backend}, None)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != backend


def test_options_of_a_test_and_of_the_call_reach_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **kwargs: given.append(kwargs) if model is f else None)
    with closing(Watch()) as watch:
        watch.check_everything("inductor")
        with watch.test(((), {"every": 3, "ignore": ("rng",)})):
            torch.compile(f, mode="max-autotune", options={"epilogue_fusion": True}, fullgraph=True)
        torch.compile(f, backend="aot_eager", dynamic=True)
    first, second = (call["backend"] for call in given)
    assert given[0].keys() == {"backend", "fullgraph"}
    assert (first._mode, first._options["every"], first._options["ignore"]) == ("max-autotune", 3, ("rng",))
    assert first._options["compiler"] == "inductor"
    assert first._options["compiler_options"] == {"epilogue_fusion": True}
    assert given[1] == {"backend": second, "dynamic": True}
    assert (second._options["compiler"], "every" in second._options) == ("aot_eager", False)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"backend": "nosuch"},
        {"mode": "nosuch"},
        {"options": {"nosuch": 1}},
        {"options": {"max_autotune": "word"}},
        {"mode": "default", "options": {"max_autotune": True}},
        {"nosuch": 1},
    ],
    ids=str,
)
def test_what_torch_refuses_is_refused_at_once_and_in_its_words(kwargs: dict[str, Any]) -> None:
    def refusal() -> str:
        with pytest.raises(Exception, match=r"nosuch|max_autotune|mode") as refused:
            torch.compile(f, **kwargs)
        return repr(refused.value)

    expected = refusal()
    with closing(Watch()) as watch:
        watch.check_everything("eager")
        assert refusal() == expected
