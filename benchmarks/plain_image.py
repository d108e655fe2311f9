"""A small image flow as one writes it at first, in plain PyTorch: what the package's own is measured against.

CIFAR-10, uniform dequantization; two levels, each a squeeze and four couplings, with a mixing layer before the first
and after each; or three, of a squeeze, a 1×1 and four Sylvester layers. The models of the presets cifar10-anchor-*,
with nothing of the package in them.

python -m benchmarks.plain_image train --mixing 1x1 --seed 0 --data .data
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS, SUBFLOWS, GROWTH, DEPTH = 2, 4, 32, 2
SYLVESTER_LEVELS, HIDDEN, GAMMA = 3, 96, 0.5
TERMS_TRAINING, TERMS_EVALUATION = 6, 13  # as the paper's authors do
SYLVESTER_TERMS_TRAINING, SYLVESTER_TERMS_EVALUATION = 9, 20
COEFF = 0.9


class DenseLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 1)
        self.conv2 = nn.Conv2d(channels, GROWTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv2(F.relu(self.conv1(x))))
        return torch.cat([x, h], dim=1)


class Network(nn.Module):
    """1×1, a gated DenseNet in residual, and a 1×1 from zero."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, GROWTH, 1)
        self.dense = nn.Sequential(*(DenseLayer(GROWTH * (i + 1)) for i in range(DEPTH)))
        self.gate = nn.Conv2d(GROWTH * (DEPTH + 1), 3 * GROWTH, 1)
        self.last = nn.Conv2d(GROWTH, out_channels, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a, b, c = self.gate(self.dense(h)).chunk(3, dim=1)
        return self.last(h + a + b * torch.sigmoid(c))


class Coupling(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = Network(channels // 2, channels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = x.chunk(2, dim=1)
        s, t = self.net(x1).chunk(2, dim=1)
        log_scale = 2 * torch.tanh(s / 2)
        z = torch.cat([x1, x2 * torch.exp(log_scale) + t], dim=1)
        return z, log_scale.sum(dim=(1, 2, 3))


class Conv1x1(nn.Module):
    def __init__(self, channels: int, start: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0] if start is None else start)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = F.conv2d(x, self.weight[:, :, None, None])
        return z, x.shape[2] * x.shape[3] * torch.linalg.slogdet(self.weight)[1]


def haar(channels: int, colours: bool) -> Tensor:
    """Averages of the 2 × 2 points of each image, then differences; of three colours the average and two contrasts."""
    points = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    images = torch.eye(channels // 4)
    if colours:
        images = F.normalize(torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]]), dim=1)
    return torch.einsum("ip,cd->icdp", points, images).reshape(channels, channels)


class ConvExp(nn.Module):
    """The exponential of a 3×3 convolution, by a fixed number of terms of its series.

    The convolution's norm on the image is kept below 0.9 by one power iteration per training step.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, 3, 3) / (9 * channels))
        self.register_buffer("v", torch.empty(0))

    def kernel(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                if self.v.numel() == 0:
                    self.v = F.normalize(torch.randn_like(x[:1]), dim=(1, 2, 3))
                u = F.conv2d(self.v, self.weight, padding=1)
                self.v = F.normalize(F.conv_transpose2d(u, self.weight, padding=1), dim=(1, 2, 3))
        sigma = F.conv2d(self.v, self.weight, padding=1).norm()
        return self.weight * (COEFF / sigma.clamp(min=COEFF))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kernel = self.kernel(x)
        z = exponential(x, kernel, TERMS_TRAINING if self.training else TERMS_EVALUATION)
        return z, x.shape[2] * x.shape[3] * kernel[:, :, 1, 1].trace()


def exponential(x: Tensor, kernel: Tensor, terms: int) -> Tensor:
    """x + K x + K² x / 2 + …"""
    product = z = x
    for i in range(1, terms + 1):
        product = F.conv2d(product, kernel, padding=1) / i
        z = z + product
    return z


class MaskedConv(nn.Module):
    """A convolution in raster order; at the centre an output sees channels of lower or equal degree."""

    def __init__(self, degrees: Tensor, out_degrees: Tensor, size: int, *, strict: bool = False) -> None:
        super().__init__()
        mask = torch.zeros(len(out_degrees), len(degrees), size * size)
        mask[:, :, : size * size // 2] = 1
        below = out_degrees[:, None] > degrees if strict else out_degrees[:, None] >= degrees
        mask[:, :, size * size // 2] = below.float()
        self.register_buffer("mask", mask.reshape(len(out_degrees), len(degrees), size, size))
        self.weight = nn.Parameter(torch.randn(self.mask.shape) * (mask.sum() / len(out_degrees)) ** -0.5)
        self.bias = nn.Parameter(torch.zeros(len(out_degrees)))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.weight.shape[-1] // 2)


class Sylvester(nn.Module):
    """z = x + W⁻¹ f(W x) with W = exp(M) Q, Q a product of reflections, and f autoregressive."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(channels, channels))
        self.exp = ConvExp(channels)
        degrees, hidden = torch.arange(channels), torch.arange(HIDDEN) % channels
        self.first = MaskedConv(degrees, hidden, 3, strict=True)
        self.middle = MaskedConv(hidden, hidden, 1)
        self.last = MaskedConv(hidden, degrees.repeat(4), 3)
        with torch.no_grad():
            self.last.weight.mul_(0.01)
            self.last.bias[:channels].fill_(1)

    def reflect(self, x: Tensor, order: Tensor) -> Tensor:
        for v in F.normalize(self.vectors, dim=0).T[order]:
            x = x - 2 * v[:, None, None] * (x * v[:, None, None]).sum(dim=1, keepdim=True)
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        terms = SYLVESTER_TERMS_TRAINING if self.training else SYLVESTER_TERMS_EVALUATION
        kernel, order = self.exp.kernel(x), torch.arange(x.shape[1])
        u = exponential(self.reflect(x, order.flip(0)), kernel, terms)
        h = F.elu(self.middle(F.elu(self.first(u))))
        s1, s2, t1, t2 = self.last(h).chunk(4, dim=1)
        s1, s2 = torch.tanh(s1), GAMMA * torch.tanh(s2)
        a = torch.tanh(u * s1 + t1)
        z = x + self.reflect(exponential(s2 * a + t2, -kernel, terms), order)
        return z, torch.log1p(s1 * s2 * (1 - a**2)).sum(dim=(1, 2, 3))


class ActNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(channels, 1, 1))
        self.log_scale = nn.Parameter(torch.zeros(channels, 1, 1))
        self.register_buffer("initialised", torch.tensor(False))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and not self.initialised:
            with torch.no_grad():
                self.shift.copy_(x.mean(dim=(0, 2, 3))[:, None, None])
                self.log_scale.copy_(-x.std(dim=(0, 2, 3), correction=0)[:, None, None].log())
                self.initialised.fill_(True)
        return (x - self.shift) * self.log_scale.exp(), x.shape[2] * x.shape[3] * self.log_scale.sum()


class SylvesterLevel(nn.Module):
    """Keeps the shape: what leaves goes beside what the levels below make of the rest."""

    def __init__(self, channels: int, levels: int, colours: bool) -> None:
        super().__init__()
        channels *= 4
        self.matrix = Conv1x1(channels, haar(channels, colours))
        self.norms = nn.ModuleList(ActNorm(channels) for _ in range(SUBFLOWS))
        self.flows = nn.ModuleList(Sylvester(channels) for _ in range(SUBFLOWS))
        self.rest = SylvesterLevel(channels // 2, levels - 1, False) if levels > 1 else None
        self.prior = Coupling(channels) if levels > 1 else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.matrix(F.pixel_unshuffle(x, 2))
        for k, (norm, flow) in enumerate(zip(self.norms, self.flows, strict=True)):
            x, scale = norm(x.flip(1, 2, 3) if k else x)
            x, logdet = flow(x)
            total = total + scale + logdet
        if self.rest is not None and self.prior is not None:
            x, logdet = self.prior(x)
            staying, leaving = x.chunk(2, dim=1)
            z, more = self.rest(staying)
            x, total = torch.cat([z, leaving], dim=1), total + logdet + more
        return F.pixel_shuffle(x, 2), total


class PlainSylvesterFlow(nn.Module):
    """As `PlainImageFlow`, of Sylvester layers, with a mean and a standard deviation for each entry of the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.level = SylvesterLevel(3, SYLVESTER_LEVELS, True)
        self.mean = nn.Parameter(torch.zeros(3, 32, 32))
        self.log_std = nn.Parameter(torch.zeros(3, 32, 32))

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        h = x.float()
        h = (h + (torch.rand_like(h) if noise is None else noise) - 128) / 256
        z, logdet = self.level(h)
        constant = z[0].numel() * math.log(256) + self.log_std.sum()
        return logdet + log_normal((z - self.mean) * (-self.log_std).exp()) - constant


class Level(nn.Module):
    def __init__(self, channels: int, mixing: str, last: bool) -> None:
        super().__init__()

        def mix(start: Tensor | None = None) -> list[nn.Module]:
            matrix = Conv1x1(channels, start)
            return [matrix] if mixing == "1x1" else [matrix, ConvExp(channels)]

        layers = mix(haar(channels, colours=not last))
        for _ in range(SUBFLOWS):
            layers += [Coupling(channels), *mix()]
        self.layers = nn.ModuleList(layers)
        self.prior = None if last else Coupling(channels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """What goes on to the next level, what leaves here, and the log-determinant."""
        x = F.pixel_unshuffle(x, 2)
        total = x.new_zeros(x.shape[0])
        for layer in self.layers:
            x, logdet = layer(x)
            total = total + logdet
        if self.prior is None:
            return x, None, total
        x, logdet = self.prior(x)
        x, z = x.chunk(2, dim=1)
        return x, z, total + logdet


class PlainImageFlow(nn.Module):
    """log p of integer images, `(batch, 3, h, w)`, with uniform noise added: `(batch,)`."""

    def __init__(self, mixing: str) -> None:
        super().__init__()
        channels, levels = 3, []
        for k in range(LEVELS):
            levels.append(Level(4 * channels, mixing, last=k == LEVELS - 1))
            channels = 2 * channels
        self.levels = nn.ModuleList(levels)

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        size = x[0].numel()
        h = x.float()
        h = (h + (torch.rand_like(h) if noise is None else noise) - 128) / 256
        result = h.new_full((len(h),), -size * math.log(256))
        for level in self.levels:
            h, z, logdet = level(h)
            result = result + logdet
            if z is not None:
                result = result + log_normal(z)
        return result + log_normal(h)


def plain_model(kind: str) -> nn.Module:
    """By what distinguishes the presets."""
    return PlainSylvesterFlow() if kind == "sylvester" else PlainImageFlow(kind)


def log_normal(z: Tensor) -> Tensor:
    return (-0.5 * (z**2 + math.log(2 * math.pi))).sum(dim=(1, 2, 3))


def fit(model: nn.Module, images: Tensor, steps: int, after: Callable[[int, Tensor], None]) -> None:
    """Train; `after` is called with the number of each step and its loss."""
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    order = torch.empty(0, dtype=torch.int64)
    for step in range(1, steps + 1):
        if len(order) < 32:
            order = torch.randperm(len(images))
        chosen, order = order[:32], order[32:]
        x = images[chosen]
        x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
        loss = -model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        after(step, loss)


def train(mixing: str, seed: int, folder: Path, steps: int, images: int) -> dict[str, float]:
    """Bits per dimension of the first test images, their standard error, and the seconds of a step."""
    from expmflow.data import load_images

    torch.manual_seed(seed)
    data = load_images("cifar10", folder=folder, generator=torch.Generator())
    model, per_bit, start = plain_model(mixing), data.train[0].numel() * math.log(2), time.perf_counter()

    def show(step: int, loss: Tensor) -> None:
        if step % 50 == 0 or step == steps:
            seconds = (time.perf_counter() - start) / step
            print(f"step {step}: {loss.item() / per_bit:.3f} bits per dimension, {seconds:.3f} s per step", flush=True)

    fit(model, data.train, steps, show)
    taken = (time.perf_counter() - start) / steps
    model.eval()
    with torch.no_grad():
        bits = torch.cat([-model(batch) for batch in data.test[:images].split(100)]) / per_bit
    print(f"{mixing}, seed {seed}, {steps} steps: {bits.mean().item():.4f} bits per dimension on {len(bits)} images")
    return {"bpd": bits.mean().item(), "error": bits.std().item() / len(bits) ** 0.5, "seconds_per_step": taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", choices=["train"])
    parser.add_argument("--mixing", choices=["1x1", "convexp", "sylvester"], default="1x1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=Path(".data"), help="the folder with cifar-10-batches-bin")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--images", type=int, default=2000, help="test images to measure on, the first ones")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the result")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    found = train(arguments.mixing, arguments.seed, arguments.data, arguments.steps, arguments.images)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
