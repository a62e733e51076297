"""Train real models under ``debug_interpreter`` and keep what it reports.

    python tests/metadata/sweep_models.py results.json [--only bert,gpt2]

Each model of `metadata_models` takes two training steps and one of inference, each with another batch size and length,
with dynamic shapes; those of `more_models` one training step as they are, with ``nonfinite`` too. A model passes if
no mismatch is reported that is not among the known bugs of torch. What makes an infinity or a NaN is listed: it is so
(T5 takes the logarithm of distances that are 0, and selects others). A later run goes on where the file ends.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import checked_backend as cb
from checked_backend.backends import debug_interpreter
from tests.metadata.test_models import KNOWN, train
from tests.support import more_models
from tests.support.metadata_models import MODELS
from tests.support.models import Case

__all__ = ["main"]


def main() -> None:
    """Sweep, print a line for each model, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="", help="these models, though the file has them")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(chosen.results.read_text()) if chosen.results.exists() else {}
    programs: dict[str, Callable[[], dict[str, Any]]] = {name: partial(_any_size, name) for name in MODELS}
    for make in (*more_models.HUGGING_FACE, *more_models.WRITTEN_HERE):
        programs[f"{make.__name__} with its loss"] = partial(_one_step, make)
    only = [name for name in chosen.only.split(",") if name]
    for name in only or [name for name in programs if name not in results]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        began = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results[name] = programs[name]()
            except Exception:
                results[name] = {"reported": [traceback.format_exc(limit=-3)]}
        chosen.results.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {time.monotonic() - began:.0f} s {json.dumps(results[name])}", flush=True)
    reported = [name for name, result in results.items() if result["reported"]]
    print(f"{len(results) - len(reported)} of {len(results)} models pass; the others: {reported}")


def _any_size(name: str) -> dict[str, Any]:
    return _told(train(name, dynamic=True)[1])


def _one_step(make: Callable[[], Case]) -> dict[str, Any]:
    case = make()
    options = {"on_divergence": "record", "nonfinite": True}
    compiled = torch.compile(case.model.train(), backend=debug_interpreter, options=options)
    with cb.collect() as session:
        case.loss(compiled(**case.inputs)).backward()
    return _told(session.report)


def _told(report: cb.Report) -> dict[str, Any]:
    first = [finding for finding in report.findings if not finding.evidence["inherited"]]
    own = [finding for finding in first if finding.kind is not cb.Kind.NONFINITE]
    known = Counter(f"{f.op} {f.detail}" for f in own if (f.op or "", f.detail) in KNOWN)
    return {
        "nodes checked": {key: count for key, count in report.coverage.checked.items() if key.startswith("nodes")},
        "skipped": sorted({f"{skip.subject}: {skip.reason}"[:200] for skip in report.coverage.skipped}),
        "known": dict(known),
        "nonfinite": [finding.message for finding in first if finding.kind is cb.Kind.NONFINITE],
        "reported": [finding.message for finding in own if (finding.op or "", finding.detail) not in KNOWN],
    }


if __name__ == "__main__":
    main()
