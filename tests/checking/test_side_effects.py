"""What code reaches by names is as it was after a run."""

from __future__ import annotations

import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from checked_backend.checking.code_search import CodeSearch

space = types.SimpleNamespace(count=0)
containers: dict[str, Any] = {
    "list": [1],
    "deque": deque([1], maxlen=3),
    "set": {1},
    "dict": {1: 1},
    "ordered": OrderedDict([(2, 1), (1, 1)]),
    "default": defaultdict(list, {1: [1]}),
    "counter": Counter([1]),
}
made = 0


def changes_all() -> None:
    global made, unknown
    made, unknown = 1, 2  # type: ignore[name-defined]
    space.count += 1
    space.extra = space
    containers["list"].append(2)
    containers["deque"].extend([2, 3, 4])
    containers["set"].add(2)
    containers["dict"][2] = 2
    containers["ordered"].move_to_end(2)
    containers["default"][1].append(2)
    containers["counter"].clear()
    containers["new"] = 1


def wrapped(function: Callable[[], None]) -> Callable[[], None]:
    calls = [0]

    @functools.wraps(function)
    def call() -> None:
        calls[0] += 1
        call.calls = calls[0]  # type: ignore[attr-defined]
        function()

    return call


@pytest.mark.parametrize("around", [lambda f: f, wrapped, lambda f: functools.partial(f), functools.cache])
def test_places_and_containers_are_put_back_in_order(around: Callable[[Any], Any]) -> None:
    def state() -> str:
        return repr((containers, space, made, "unknown" in globals()))

    before, told = state(), []
    function = around(changes_all)
    with CodeSearch([function], holdings=False).now().in_place(told.append):
        function()
        assert state() != before
    assert (state(), told) == (before, [])
    assert containers["deque"].maxlen == 3


def test_what_was_is_put_in_place_and_what_is_comes_back() -> None:
    moment = CodeSearch([changes_all], holdings=False).now()
    with moment.in_place(lambda _: None):
        before = repr((containers, space, made))
        changes_all()
        after = repr((containers, space, made))
        with moment.in_place(lambda _: None):
            assert repr((containers, space, made)) == before
            changes_all()
        assert repr((containers, space, made)) == after != before


def test_an_exception_passes_and_all_is_put_back() -> None:
    def fails() -> None:
        changes_all()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), CodeSearch([fails], holdings=False).now().in_place(lambda _: None):
        fails()
    assert (space.count, made) == (0, 0)


def test_nothing_of_torch_or_of_dynamo_is_reached() -> None:

    net = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    found = CodeSearch([lambda x: net(x).sum()], holdings=False)
    assert all(not place.home.startswith("torch") for place in found.variables.values())
    assert not found.holders
