"""A decoder of x_transformers, compiled, trained for two steps and asked for what follows."""

import hashlib

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.manual_seed(0)
model = AutoregressiveWrapper(
    TransformerWrapper(
        num_tokens=32, max_seq_len=16, attn_layers=Decoder(dim=32, depth=1, heads=2, rotary_pos_emb=True)
    )
)
model.net.compile(backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    loss = model(torch.randint(0, 32, (2, 13)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item(), hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
with torch.no_grad():
    print(model.generate(torch.randint(0, 32, (1, 4)), 2, temperature=0.0, cache_kv=False).tolist())
