"""A training loop in torchtitan's shape: each block compiled by name, then FSDP2; every region of each rank is checked.

Run it as ``torchrun --nproc-per-node 2 examples/fsdp2_train.py --compile.backend numcheck``. The options have
torchtitan's names; there it is ``--compile.enable --compile.backend numcheck``. Options of the check come from the
environment, for example ``CHECKED_BACKEND_EVERY=100`` or ``CHECKED_BACKEND_BUDGET=0.01``, and so does what is checked:
Inductor, or what ``CHECKED_BACKEND_COMPILER`` names.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import checked_backend as cb

WIDTH, HEADS, WORDS = 32, 4, 64


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both, each with its residual."""
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.out(seen)
        return x + self.down(F.silu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """A small language model."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(blocks)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """The logits of the next word at each place."""
        x = self.embeddings(words)
        for block in self.layers.values():
            x = block(x)
        return self.output(self.norm(x))


def apply_compile(model: Decoder, backend: str) -> None:
    """Compile each block, as torchtitan does: all of them share the code of one."""
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, backend=backend, fullgraph=True))


def apply_fsdp(model: Decoder) -> None:
    """Shard each block, then the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> cb.Report:
    """Train on random words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile.backend", dest="backend", default="numcheck")
    parser.add_argument("--training.steps", dest="steps", type=int, default=4)
    parser.add_argument("--model.blocks", dest="blocks", type=int, default=2)
    given = parser.parse_args()
    os.environ.setdefault("CHECKED_BACKEND_ON_DIVERGENCE", "record")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Decoder(given.blocks)
    apply_compile(model, given.backend)
    apply_fsdp(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    with cb.collect(closing=False) as session:
        for step in range(given.steps):
            words = torch.randint(0, WORDS, (4, 17))
            loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"rank {dist.get_rank()}, step {step + 1}: loss {loss.item():.6f}")
    print(f"rank {dist.get_rank()}: {str(session.report).partition(chr(10))[0]}")
    dist.destroy_process_group()
    return session.report


if __name__ == "__main__":
    main().raise_for_verdict()
