"""``python -m tests.calibration``: run the cases, print the confusion table and the margins."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from .constants import changed
from .families import FAMILIES
from .family import bugs_of
from .rounding import VARIANTS
from .run import DTYPES, Case, Outcome, run_case
from .table import render


def cases(
    families: Sequence[str],
    dtypes: Sequence[str],
    modes: Sequence[str],
    compiler: str,
    face: str,
    which: Sequence[str],
    seed: int,
) -> Iterator[Case]:
    """Every case asked for.

    Args:
        families: Names of families.
        dtypes: Names of dtypes.
        modes: ``inference``, ``training``.
        compiler: The candidate that compiles planted bugs; with ``eager``, clean cases run under every emulated
            rounding, else under this candidate.
        face: ``check``, ``numcheck`` or ``steady``.
        which: ``clean``, ``bugs``.
        seed: Of the inputs.
    """
    for name in families:
        subject = FAMILIES[name]
        for dtype in dtypes:
            if not subject.low and dtype in ("bfloat16", "float16"):
                continue
            bugs = bugs_of(subject, DTYPES[dtype])
            for mode in modes:
                if mode == "training" and not subject.trains:
                    continue
                if "clean" in which:
                    for clean in VARIANTS if compiler == "eager" else (compiler,):
                        yield Case(name, dtype, mode, clean, "", face, seed)
                if "bugs" in which:
                    for bug in bugs:
                        yield Case(name, dtype, mode, compiler, bug, face, seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and return 1 if a clean case was not passed or a bug above the noise was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.calibration", description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"], choices=list(DTYPES))
    parser.add_argument("--mode", nargs="*", default=["inference", "training"], choices=["inference", "training"])
    parser.add_argument(
        "--compiler", default="eager", help="eager (default), inductor, aot_eager, " + ", ".join(VARIANTS)
    )
    parser.add_argument("--face", default="check", choices=["check", "numcheck", "steady"])
    parser.add_argument("--only", nargs="*", default=["clean", "bugs"], choices=["clean", "bugs"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="run every n-th case only")
    parser.add_argument(
        "--constant", nargs="*", default=[], metavar="NAME=VALUE", help="decide with another value of a constant"
    )
    parser.add_argument("--resume", type=Path, help="JSON lines of results, to go on from and to append to")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which no case is begun")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    outcomes = _read(options.resume)
    wanted = list(
        cases(options.families, options.dtype, options.mode, options.compiler, options.face, options.only, options.seed)
    )[:: options.every]
    until = time.monotonic() + options.time_limit
    for number, case in enumerate(wanted):
        if case.key in outcomes:
            continue
        if time.monotonic() > until:
            print(f"time limit: {len(wanted) - number} cases left; go on with --resume", file=sys.stderr)
            break
        with changed(options.constant):
            outcomes[case.key] = outcome = run_case(case)
        if options.resume is not None:
            with options.resume.open("a") as file:
                file.write(json.dumps(outcome.to_json()) + "\n")
    shown = [outcomes[case.key] for case in wanted if case.key in outcomes]
    text, good = render(shown)
    print(text)
    return 0 if good else 1


def _read(path: Path | None) -> dict[str, Outcome]:
    if path is None or not path.exists():
        return {}
    outcomes = [Outcome.from_json(json.loads(line)) for line in path.read_text().splitlines()]
    return {outcome.case.key: outcome for outcome in outcomes}


if __name__ == "__main__":
    sys.exit(main())
