"""Initial weights for networks without normalisation between layers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from expmflow.nn.densenet import DenseBlock

RELU = 2.0  # a ReLU halves the second moment
GATED_SUM = 0.8  # a + b·σ(c) has 5/4 of it if c is small


def keep_scale(layers: Iterable[nn.Module]) -> None:
    """Redraw weights so that DenseNet blocks and maps preserve the second moment of a signal.

    With torch's own initialisation each convolution loses two thirds of it. A signal then fades to a thousandth through
    the ten or twenty convolutions of a decoder, and training stands still until the weights have grown.

    Args:
        layers: blocks, convolutions, transposed convolutions whose kernels do not overlap, and linear maps; others are
            left unchanged.
    """
    for layer in layers:
        if isinstance(layer, DenseBlock):
            for part in layer.layers.modules():
                if isinstance(part, nn.Conv2d):
                    _draw(part, RELU)
            _draw(layer.gate, GATED_SUM if layer.gate.out_channels > layer.out_channels else 1.0)
        elif isinstance(layer, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            _draw(layer, 1.0)


def _draw(layer: nn.Conv2d | nn.ConvTranspose2d | nn.Linear, gain: float) -> None:
    inputs = layer.in_channels if isinstance(layer, nn.ConvTranspose2d) else layer.weight[0].numel()
    nn.init.normal_(layer.weight, std=(gain / inputs) ** 0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
