"""Run a module as ``python -m MODULE`` does, and print a checksum of the weights after all steps of its optimizers.

A NumPy generator that the module makes without a seed gets one, so that two runs can be compared.
"""

from __future__ import annotations

import hashlib
import runpy
import sys
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    seen, steps = hashlib.sha256(), []

    def look(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        steps.append(1)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen.update(parameter.detach().numpy().tobytes())

    register_optimizer_step_post_hook(look)
    unseeded = np.random.default_rng
    np.random.default_rng = lambda seed=None: unseeded(0 if seed is None else seed)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    print(f"weights after {len(steps)} steps: {seen.hexdigest()}")


if __name__ == "__main__":
    main()
