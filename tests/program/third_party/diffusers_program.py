"""Diffusers: a pipeline whose UNet is compiled, a transformer whose repeated blocks are, and a step of training."""

import torch
from diffusers import DDIMScheduler, DDPMPipeline, DDPMScheduler, FluxTransformer2DModel, UNet2DModel


def checksum(tensor: torch.Tensor) -> str:
    """Every bit counts."""
    return f"{tensor.detach().flatten().view(torch.int32).long().sum().item():x}"


torch.manual_seed(0)
unet = UNet2DModel(
    sample_size=8,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(8,),
    down_block_types=("DownBlock2D",),
    up_block_types=("UpBlock2D",),
    norm_num_groups=4,
    add_attention=False,
)
pipeline = DDPMPipeline(unet=unet, scheduler=DDIMScheduler(num_train_timesteps=10))
pipeline.set_progress_bar_config(disable=True)
pipeline.unet.compile(fullgraph=True)
images = pipeline(num_inference_steps=2, generator=torch.Generator().manual_seed(1), output_type="np").images
print("pipeline", images.shape, checksum(torch.from_numpy(images)))

scheduler = DDPMScheduler(num_train_timesteps=10)
optimizer = torch.optim.SGD(unet.parameters(), lr=0.01)
for step in range(1):
    clean, noise = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    times = torch.randint(0, 10, (2,))
    loss = (unet(scheduler.add_noise(clean, noise, times), times).sample - noise).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, checksum(loss))
print("weights", *(checksum(parameter) for parameter in unet.parameters()))

flux = FluxTransformer2DModel(
    patch_size=1,
    in_channels=4,
    num_layers=1,
    num_single_layers=1,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
    pooled_projection_dim=32,
    axes_dims_rope=[4, 4, 8],
)
flux.compile_repeated_blocks(fullgraph=True)
with torch.no_grad():
    made = flux(
        hidden_states=torch.randn(1, 16, 4),
        encoder_hidden_states=torch.randn(1, 6, 32),
        pooled_projections=torch.randn(1, 32),
        timestep=torch.tensor([1.0]),
        img_ids=torch.randn(16, 3),
        txt_ids=torch.randn(6, 3),
    ).sample
print("transformer", made.shape, checksum(made))
