"""Call operators that a dump may call with arguments that fit nothing, under the guard of a replay, in children.

    python wild_program.py TRIES NAME ...

Inputs lie next to memory that cannot be touched. Prints JSON: how many calls returned, and which killed a child. A
division by zero does not count: the child of a replay dies of it, and nothing was written.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import resource
import signal
import sys
import warnings
from typing import Any

import torch

from checked_backend._torch.operators import has_dispatched
from checked_backend.dump.eager import _Guard

DONE = 99
TURNS = 300  # of one child: the memory of a turn is not given back, and where there is none nothing is tried
PAGE = mmap.PAGESIZE
SHAPES = [(), (1,), (2,), (3,), (0,), (2, 3), (3, 3), (1, 4), (4, 4), (0, 3), (2, 0), (1, 2, 4), (2, 3, 4), (1, 1, 1)]
SHAPES += [(2, 2, 4, 4), (1, 1, 4, 4), (1, 2, 3, 4), (2, 3, 4, 5), (1, 1, 2, 2, 2), (1, 2, 4, 4, 4), (16,), (64,)]
INTS = [0, 1, 2, 3, 4, -1, -2, 5, 8, 16, 100, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63), 10**9, 2**40]
FLOATS = [0.0, 1.0, 0.5, -1.0, 1e-5, 2.0, 1e30, float("nan"), float("inf")]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.uint8]
WORDS = ["mean", "sum", "none", "linear", "reflect", "constant", "circular", "ij", "amax", "prod", "zeros", "gelsd"]
WORDS += ["complete", "reduced", "L", "U", "floor", "trunc", "tanh", "max", "min", "i,j->ij", "fro"]
LAYOUTS, DEVICES = [torch.strided, torch.sparse_coo], [torch.device("cpu"), torch.device("meta")]
FORMATS = [torch.contiguous_format, torch.channels_last, torch.preserve_format]

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def fenced(values: torch.Tensor) -> torch.Tensor:
    """The same values, between pages that cannot be read."""
    size = values.numel() * values.element_size()
    if not size:
        return values
    pages = (size + PAGE - 1) // PAGE + 2
    base = libc.mmap(None, pages * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANON, -1, 0)
    for page in (0, pages - 1):
        libc.mprotect(base + page * PAGE, PAGE, 0)
    memory = (ctypes.c_char * size).from_address(base + (pages - 1) * PAGE - size)
    return torch.frombuffer(memory, dtype=values.dtype).view(values.shape).copy_(values)


def tensor(chance: random.Random) -> torch.Tensor:
    shape, kind = chance.choice(SHAPES), chance.random()
    if kind < 0.6:
        made = torch.rand(shape)
    elif kind < 0.65:
        made = torch.full(shape, chance.choice([*FLOATS, -1e30]))
    elif kind < 0.85:
        made = torch.full(shape, chance.choice([*INTS, 7, -(10**9)]))
        made = made.clamp(-(2**31), 2**31 - 1).int() if chance.random() < 0.2 else made
        if made.numel() > 1 and chance.random() < 0.5:
            made.view(-1)[0] = 0
    else:
        made = (torch.rand(shape) * 2).to(chance.choice(DTYPES))
    made = fenced(made)
    return made.transpose(0, -1) if made.dim() >= 2 and chance.random() < 0.15 else made


def value(chance: random.Random, kind: str, tensors: list[torch.Tensor]) -> Any:
    if kind.startswith("Optional["):
        return None if chance.random() < 0.4 else value(chance, kind[9:-1], tensors)
    if kind.startswith("List["):
        if kind == "List[bool]":
            return [True] * 3
        return [value(chance, kind[5:-1], tensors) for _ in range(chance.choice([0, 1, 1, 2, 2, 2, 3, 3, 4, 6]))]
    if kind == "Tensor":
        if not tensors or chance.random() < 0.5:
            tensors.append(tensor(chance))
        return chance.choice(tensors)
    if kind in ("int", "SymInt"):
        return chance.choice(INTS) if chance.random() < 0.5 else chance.randrange(5)
    plain = {"float": FLOATS, "bool": [True, False], "str": WORDS, "ScalarType": DTYPES, "Layout": LAYOUTS}
    plain |= {"Device": DEVICES, "MemoryFormat": FORMATS, "number": [0, 1, 2, -1, 0.5, 2**62, True, 1j]}
    return chance.choice(plain.get(kind, [None]))


def call(operator: Any, seed: str) -> None:
    chance, tensors = random.Random(seed), list[torch.Tensor]()
    positional, named = [], {}
    for argument in operator._schema.arguments:
        given = argument.has_default_value() and chance.random() < 0.4
        made = argument.default_value if given else value(chance, str(argument.real_type), tensors)
        if argument.kwarg_only:
            named[argument.name] = made
        else:
            positional.append(made)
    with _Guard():
        operator(*positional, **named)


def main() -> None:
    tries, *names = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    packets = [getattr(torch.ops.aten, name) for name in names]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    chosen, board = [one for one in overloads if has_dispatched(one)], mmap.mmap(-1, 16)
    deaths: dict[str, str] = {}
    turns = [(operator, attempt) for operator in chosen for attempt in range(int(tries))]
    start = 0
    while start < len(turns):
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            torch.manual_seed(0)
            for place in range(start, min(start + TURNS, len(turns))):
                board[:8] = place.to_bytes(8, "little")
                signal.alarm(5)
                try:
                    call(turns[place][0], f"{turns[place][0]} {turns[place][1]}")
                    board[8:] = (int.from_bytes(board[8:], "little") + 1).to_bytes(8, "little")
                except Exception:
                    pass
            os._exit(DONE)  # a kernel that leaves the process otherwise has ended it
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == DONE:
            start += TURNS
            continue
        place = int.from_bytes(board[:8], "little")
        if os.waitstatus_to_exitcode(status) not in (-signal.SIGALRM, -signal.SIGFPE):
            deaths[f"{turns[place][0]} {turns[place][1]}"] = f"status {os.waitstatus_to_exitcode(status)}"
        start = place + 1
    worked = int.from_bytes(board[8:], "little")
    print(json.dumps({"worked": worked, "deaths": deaths}))


if __name__ == "__main__":
    main()
