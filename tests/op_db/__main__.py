"""``python -m tests.op_db metadata|check results.jsonl``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from . import __doc__ as about
from . import check, metadata


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.op_db", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("metadata", "check"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--samples", type=int, default=None, help="of each operator; all if not given")
    parser.add_argument("--every", type=int, default=1, help="take every k-th operator")
    parser.add_argument("--write", type=Path, default=None, metavar="FILE", help="write the list, sweep nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    program: Any = {"metadata": metadata, "check": check}[options.what]
    if options.write is None:
        for result in program.sweep(
            options.results, seconds=options.seconds, samples=options.samples, every=options.every
        ):
            if program.interesting(result):
                print(json.dumps(result), flush=True)
    print(program.summary(options.results))
    if options.write is not None:
        text = json.dumps(program.document(options.results), indent=1)
        options.write.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
