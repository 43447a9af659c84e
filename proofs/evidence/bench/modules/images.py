"""Models of images: ConvNeXt and ViT of transformers, a U-Net, and a diffusion sampler."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.proofs.evidence.bench.modules.variants import Call, Setting
from weft.stages.custom.module import from_module
from weft.transforms.pipelines.microbatch import scan


def convnext(setting: Setting) -> Call:
    """The forward pass of ConvNeXt-Tiny on 16 images."""
    from transformers import ConvNextConfig, ConvNextModel

    # Initial layers count for a millionth, whose errors would not show.
    scale: dict[str, Any] = {"layer_scale_init_value": 0.1}
    full = ConvNextConfig(**scale)
    small = ConvNextConfig(
        depths=[1, 1], hidden_sizes=[8, 16], num_stages=2, image_size=32, **scale
    )
    return _of_images(setting, setting.size(full, small), ConvNextModel, setting.size(16, 2))


def vit(setting: Setting) -> Call:
    """The forward pass of ViT-B on 64 images."""
    from transformers import ViTConfig, ViTModel

    full = ViTConfig()
    small = ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
    )
    return _of_images(setting, setting.size(full, small), ViTModel, setting.size(64, 2))


class _Pixels(nn.Module):
    """A model whose result is its last hidden state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Any:
        return self.model(pixels).last_hidden_state


def _of_images(setting: Setting, config: Any, kind: Any, count: int) -> Call:
    module = setting.built(lambda: _Pixels(kind(config)), setting.half)
    size = config.image_size
    return setting.inference(module, setting.normal(count, 3, size, size, dtype=setting.half))


class ResBlock(nn.Module):
    """Two convolutions around the embedding of the time."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(embedding, outputs)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = hidden + self.time(functional.silu(time))[:, :, None, None]
        result: Tensor = self.skip(x) + self.conv2(functional.silu(self.norm2(hidden)))
        return result


class Attention(nn.Module):
    """Attention among the pixels."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(1, (self.heads, -1)).flatten(3).transpose(2, 3)
            for part in self.qkv(self.norm(x)).chunk(3, 1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v)
        result: Tensor = x + self.out(attended.transpose(2, 3).reshape(x.shape))
        return result


class UNet(nn.Module):
    """A U-Net of `(x, t)`, as denoisers are: residual blocks, attention where the image is least,
    and connections that skip over what lies below.

    Args:
        channels: those of the image.
        widths: the channels of each resolution, from the whole image down.
        heads: the heads of attention.
    """

    def __init__(self, channels: int, widths: tuple[int, ...], heads: int) -> None:
        super().__init__()
        self.width = widths[0]
        embedding = 4 * self.width
        self.time = nn.Sequential(
            nn.Linear(self.width, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        self.first = nn.Conv2d(channels, self.width, 3, padding=1)
        above = (self.width, *widths[:-1])
        self.down = nn.ModuleList(map(ResBlock, above, widths, [embedding] * len(widths)))
        self.middle = ResBlock(widths[-1], widths[-1], embedding)
        self.attention = Attention(widths[-1], heads)
        self.up = nn.ModuleList(
            ResBlock(2 * width, outputs, embedding)
            for width, outputs in zip(widths[::-1], above[::-1], strict=True)
        )
        self.norm = nn.GroupNorm(8, self.width)
        self.last = nn.Conv2d(self.width, channels, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        half = self.width // 2
        powers = torch.arange(half, device=x.device) / half
        angles = t[:, None] * torch.exp(-math.log(10_000) * powers)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))
        hidden = self.first(x)
        skips = []
        for block in self.down:
            hidden = block(hidden, time)
            skips.append(hidden)
            hidden = functional.avg_pool2d(hidden, 2)
        hidden = self.attention(self.middle(hidden, time))
        for block in self.up:
            hidden = functional.interpolate(hidden, scale_factor=2.0)
            hidden = block(torch.cat([hidden, skips.pop()], 1), time)
        result: Tensor = self.last(functional.silu(self.norm(hidden)))
        return result


def _unet(setting: Setting) -> tuple[nn.Module, Tensor, Tensor]:
    """A U-Net, its input and the time."""
    widths = setting.size((192, 384, 768), (8, 16))
    module = setting.built(lambda: UNet(4, widths, setting.size(8, 2)), setting.half)
    size = setting.size(64, 8)
    x = setting.normal(4, 4, size, size, dtype=setting.half)
    return module, x, torch.full((4,), 950.0, device=setting.device)


def unet(setting: Setting) -> Call:
    """The forward pass of the U-Net on 4 images of 64 x 64."""
    module, x, t = _unet(setting)
    return setting.inference(module, x, t)


def sampler(setting: Setting) -> Call:
    """20 steps of a diffusion sampler: `weft.scan`, or a loop of calls."""
    module, x, t = _unet(setting)
    num_steps = setting.size(20, 3)
    if not setting.is_weft:
        step = setting.module_step(module)

        def loop() -> Tensor:
            image, time = (x, t)
            for _ in range(num_steps):
                image = image - 0.05 * step(image, time)
                time = time - 950 / num_steps
            return image

        return loop
    stage = from_module(module.requires_grad_(False))

    def denoise(params: Any, state: Any, batch: Any) -> tuple[Any, None]:
        image, time, buffers = state
        buffers, noise = stage.stage(params, buffers, (image, time), None)
        return (image - 0.05 * noise, time - 950 / num_steps, buffers), None

    sample = setting.graphified(scan(denoise, num_steps))
    return lambda: sample(stage.params, (x, t, stage.state), None)[0][0]
