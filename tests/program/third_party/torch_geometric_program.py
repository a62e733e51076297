"""Graph networks of torch_geometric, compiled, trained on one graph."""

import hashlib

import torch
from torch_geometric.nn.models import GAT, GCN

torch.manual_seed(0)
edges = torch.randint(0, 20, (2, 60))
x, y = torch.randn(20, 8), torch.randint(0, 3, (20,))
for kind in (GCN, GAT):
    model = kind(8, 8, 2, 3)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(compiled(x, edges), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(
        kind.__name__,
        loss.item(),
        hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest(),
    )
