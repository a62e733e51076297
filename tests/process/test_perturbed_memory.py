"""The C library fills the memory that it hands out, and is as it was afterwards."""

from __future__ import annotations

import pytest
import torch

from checked_backend.process import perturbed_memory as module
from checked_backend.process.perturbed_memory import perturbed_memory

SIZE = 50_000


def handed_out() -> torch.Tensor:
    dirty = torch.full((SIZE,), 7.0)
    del dirty
    return torch.empty(SIZE).clone()


def test_new_memory_is_filled_and_other_seeds_fill_otherwise() -> None:
    found = []
    for seed in (1, 2):
        with perturbed_memory(seed) as can:
            if not can:
                pytest.skip("not glibc")
            found.append(handed_out())
    assert all(bool((one == one[0]).all()) and bool(one.isfinite().all()) for one in found)
    assert found[0][0] != found[1][0]


def test_what_the_user_chose_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "_option", lambda: lambda *words: asked.append(words))
    old, new = "MALLOC_PERTURB_", "GLIBC_TUNABLES"
    cases = [({}, 0), ({old: "85"}, 85), ({old: "words"}, 0), ({new: "glibc.malloc.perturb=0x11"}, 17)]
    cases += [({new: "glibc.malloc.check=3:glibc.malloc.perturb=9", old: "85"}, 9), ({new: "", old: "85"}, 85)]
    for chosen, byte in cases:
        asked.clear()
        for name in (old, new):
            monkeypatch.delenv(name, raising=False)
        for name, text in chosen.items():
            monkeypatch.setenv(name, text)
        with pytest.raises(KeyError), perturbed_memory(1):
            raise KeyError
        assert asked == [(-6, 0x42 ^ 0xFF), (-6, byte)]


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_option", lambda: None)
    with perturbed_memory(1) as can:
        assert not can
