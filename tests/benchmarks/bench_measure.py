"""How fast ``measure`` is next to ``copy_``, ``clone`` and ``torch.allclose``, and how much memory it takes.

``copy_`` writes to memory that the process has; ``clone`` asks the system for new pages each time.

Run it as a program: ``OMP_NUM_THREADS=1 python tests/benchmarks/bench_measure.py [--mib 256] [--rounds 5]``. It is
not a timed test: it prints ratios. Everything runs on one thread, in turns, and the minimum of each counts. A tensor
pair that is measured and a tensor that is copied move the same number of bytes: read and read, or read and written.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from checked_backend.numerics.measure import measure

MIB = 1 << 20


def pair(kind: str, dtype: torch.dtype, mib: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = mib * MIB // dtype.itemsize
    reference = torch.randn(count, generator=generator, dtype=torch.float32).to(dtype)
    if kind == "equal":
        return reference, reference.clone()
    epsilon = 4 * torch.finfo(dtype).eps
    noise = torch.randn(count, generator=generator, dtype=torch.float32).mul_(epsilon)
    if kind == "relative":
        noise.mul_(reference)
    return reference, noise.add_(reference).to(dtype)


def fastest(programs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(programs, float("inf"))
    for name, program in programs.items():
        if name != "allclose":
            program()
    for turn in range(rounds):
        for name, program in programs.items():
            if name == "allclose" and turn > 1:
                continue
            start = time.perf_counter()
            program()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def peak_extra_kib(kind: str, dtype: torch.dtype, mib: int) -> int:
    """Growth of the peak resident size during the first large measurement of this process, in KiB."""
    reference, candidate = pair(kind, dtype, mib)
    measure(reference=reference[:1], candidate=candidate[:1])  # libraries that load at first use
    # what preparing the tensors took is above the present size, so the peak is reset where the system can do that
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")
    before = _status("VmRSS")
    measure(reference=reference, candidate=candidate)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of each tensor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=None, help="elements per block, to compare")
    parser.add_argument("--memory", nargs=2, metavar=("KIND", "DTYPE"), help="print the peak extra memory in KiB")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        kind, name = arguments.memory
        print(peak_extra_kib(kind, getattr(torch, name), arguments.mib))
        return
    header = f"{'dtype':9} {'kind':9} {'GB/s':>6} {'copy GB/s':>9} {'of copy':>8} "
    header += f"{'of clone':>8} {'x allclose':>10} {'peak MiB':>8}"
    print(header)
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("relative", "additive", "equal"):
            reference, candidate = pair(kind, dtype, arguments.mib)
            target = torch.empty_like(reference).copy_(reference)
            best = fastest(
                {
                    "copy": lambda reference=reference, target=target: target.copy_(reference),
                    "clone": lambda reference=reference: reference.clone(),
                    "measure": lambda reference=reference, candidate=candidate: measure(
                        reference=reference, candidate=candidate, _block_size=arguments.block_size
                    ),
                    "allclose": lambda reference=reference, candidate=candidate: torch.allclose(
                        candidate, reference, rtol=0.1, atol=0.1
                    ),
                },
                arguments.rounds,
            )
            name = str(dtype).removeprefix("torch.")
            memory = subprocess.run(
                [sys.executable, __file__, "--mib", str(arguments.mib), "--memory", kind, name],
                capture_output=True,
                text=True,
                check=True,
            )
            speed = {program: 2 * reference.nbytes / seconds / 1e9 for program, seconds in best.items()}
            of_copy, faster = speed["measure"] / speed["copy"], best["allclose"] / best["measure"]
            print(
                f"{name:9} {kind:9} {speed['measure']:6.2f} {speed['copy']:9.2f} {of_copy:8.2f} "
                f"{speed['measure'] / speed['clone']:8.2f} {faster:10.1f} {int(memory.stdout) / 1024:8.1f}"
            )


if __name__ == "__main__":
    main()
