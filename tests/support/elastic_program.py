"""A training program for torch's elastic agent: a rank kills itself in the first attempt, and all are started anew."""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import checked_backend as cb
from tests.support.rank_programs import Sharded, faulty, step, told

STEPS = 6
FATAL = 3


def main(folder: Path) -> None:
    """Train on this rank, checked, and write down what the check says of each attempt that ends."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # the agent's own store may give addresses of ranks of the first attempt, to which gloo cannot connect
    store = dist.FileStore(str(folder / f"store{attempt}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    torch.manual_seed(rank)
    model = Sharded()
    compiler = faulty("before") if attempt else "aot_eager"  # from the second attempt on, it is wrong
    options = {"compiler": compiler, "on_divergence": "record", "localize": False, "report_dir": folder / "reports"}
    compiled = torch.compile(model, backend="numcheck", options=options)
    with cb.collect() as session:
        for number in range(STEPS):
            if number == FATAL and rank == 1 and not attempt:
                os.kill(os.getpid(), signal.SIGKILL)
            step(compiled, number)
    (folder / f"attempt{attempt}-rank{rank}.json").write_text(json.dumps(told(session.report)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
