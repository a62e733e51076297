"""Call every function, method and operator that a dump may call, with an audit hook that notes what they reach.

    python reach_program.py PART PARTS

Prints JSON: how many were called with how many returning, and what was reached by which.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from checked_backend._torch.operators import find_op_packet, has_dispatched, operator_names
from checked_backend.dump.eager import _Guard
from checked_backend.dump.targets import functions, is_allowed_method, operator_problem, refusal_by_name

TEXTS = ("/etc/passwd", "os.system", "this.c", "import os", "mean", "reduction_name")
WATCHED = ("import", "open", "exec", "compile", "subprocess.", "os.", "ctypes.", "socket.", "shutil.", "pty.", "code.")
# these ask for work, not for files: factorials and lists of any length
ENDLESS = ("math:factorial", "math:comb", "math:perm", "builtins:pow", "operator:pow", "operator:lshift")


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    yield from functions().items()
    for name in dir(torch.Tensor):
        if is_allowed_method(name):
            yield f"method:{name}", getattr(torch.Tensor, name)
    for namespace in ("aten", "prims"):
        for name in sorted(operator_names(namespace)):
            packet = None if refusal_by_name(f"{namespace}.{name}") else find_op_packet(namespace, name)
            if packet is not None and not operator_problem(packet):
                overloads = (getattr(packet, one) for one in packet.overloads())
                yield from ((str(one), one) for one in overloads if has_dispatched(one))


def values(chance: random.Random) -> list[Any]:
    x, i = torch.rand(2, 3), torch.tensor([0, 1])
    far = torch.tensor([10**9, -(10**9)])
    plain = [2, 0, -1, 1.5, True, None, [2, 3], [x, x], (1,), *TEXTS, torch.float32, torch.device("cpu"), slice(0, 2)]
    return [x, x.clone(), i, far, torch.ones(()), torch.rand(1, 2, 4, 4), chance.choice(plain), chance.choice(plain)]


def ways(chance: random.Random) -> Iterator[tuple[Any, ...]]:
    yield from ((), ("/etc/passwd",), ("this.c", "w"), (torch.rand(2, 3),), (torch.rand(2, 3), torch.rand(2, 3)))
    yield from ((torch.rand(2, 3), text) for text in TEXTS)
    for count in (2, 3, 4, 6):
        for _ in range(3):
            yield tuple(chance.choice(values(chance)) for _ in range(count))


def main() -> None:
    part, parts = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    current, reached, active = [""], {}, [False]

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if active[0] and event.startswith(WATCHED):
            reached.setdefault(current[0], []).append(f"{event} {given!r}"[:200])

    torch.autograd.forward_ad._maybe_load_decompositions()  # it imports, once, what is always the same
    everything = [one for one in callables() if one[0] not in ENDLESS]
    called = worked = 0
    warnings.simplefilter("ignore")
    for again in (False, True):  # the first time what torch imports late is imported
        if again:
            sys.addaudithook(hook)
        for place, (name, function) in enumerate(itertools.islice(everything, part, None, parts)):
            for args in ways(random.Random(place)):
                current[0] = name
                called += again
                try:
                    with _Guard():
                        active[0] = again
                        function(*args)
                    worked += again
                except Exception:
                    pass
                finally:
                    active[0] = False
    print(json.dumps({"called": called, "worked": worked, "reached": reached}))


if __name__ == "__main__":
    main()
