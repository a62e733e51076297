"""Programs on packages of others that call ``torch.compile`` themselves: checked, they compute what they do alone.

Each program prints checksums of its weights and results. The packages are none of this one's: what is missing is told.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.started_programs import finished, needs

RUN = (sys.executable, "-m", "checked_backend", "run", "--no-localize", "--json-file", "run.json")


def checked_calls(told: str) -> int:
    found = re.search(r"checked +\d+ regions?, (\d+) of \d+ calls", told)
    assert found is not None, told
    return int(found[1])


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("package", "more", "options"),
    [
        ("diffusers", [], []),
        ("lightning", [], []),
        ("skorch", ["sklearn"], []),
        ("torchao", [], []),
        ("hqq", ["termcolor", "einops"], []),
        ("e3nn", ["opt_einsum_fx"], []),
        # its own backend calls Inductor, which then draws random numbers of its own in stochastic rounding
        ("heavyball", [], ["--ignore", "rng"]),
        ("keras", ["h5py", "optree", "ml_dtypes"], []),
        ("torchtnt", ["pkg_resources"], []),
        ("pytorch_optimizer", [], []),
        ("torch_geometric", ["xxhash", "requests"], []),
        ("tensordict", [], []),
        # dropout of probability 0 returns its input in eager, and a copy where AOT autograd compiles it
        ("x_transformers", ["loguru", "einx"], ["--ignore", "alias"]),
    ],
)
def test_a_program_computes_bit_for_bit_what_it_does_alone(
    package: str, more: list[str], options: list[str], tmp_path: Path
) -> None:
    needs(package, *more)
    program = Path(__file__).parent / "third_party" / f"{package}_program.py"
    code, plain, err = finished((sys.executable, program), tmp_path)
    assert (code, bool(plain)) == (0, True), err
    code, checked, err = finished((*RUN, *options, program), tmp_path)
    assert (code, checked, json.loads((tmp_path / "run.json").read_text())["verdict"]) == (0, plain, "pass"), err
    assert checked_calls(err) >= 3


@pytest.mark.slow
@pytest.mark.inductor
def test_a_script_of_accelerate_runs_as_it_is(tmp_path: Path) -> None:
    needs("accelerate")
    more = {"ACCELERATE_DYNAMO_BACKEND": "inductor", "ACCELERATE_USE_CPU": "true"}
    weights = ("-m", "tests.support.weights_of", "accelerate.test_utils.scripts.test_sync")
    code, plain, err = finished((sys.executable, *weights), tmp_path, more)
    assert (code, "weights" in plain) == (0, True), err
    code, checked, err = finished((*RUN, *weights), tmp_path, more)
    assert (code, checked) == (0, plain), err
    assert checked_calls(err) >= 1
