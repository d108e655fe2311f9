"""The layers of a DenseNet as one function: all of them write into one matrix, so that nothing is concatenated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow.nn.fused import must_record, recorded_vjp, transformed


def gated_dense(h: Tensor, *weights: Tensor) -> Tensor:
    """h + a + b·σ(c) with (a, b, c) a 1×1 of h and of what all the layers add to it: `(batch, growth, *n)`.

    On the CPU, channels are last in memory: a 1×1 is a matrix product then, and what a layer adds are a few columns of
    the matrix that the next ones read. For the backward pass about half of what autograd would keep is kept.

    Args:
        h: `(batch, growth, *n)`.
        weights: of each layer the 1×1 and the 3×3, then the gate; of each its weight and its bias.
    """
    if h.device.type != "cpu" or must_record(h, *weights):
        return _formula(h, *weights)
    return _GatedDense.apply(h, *weights)


def _formula(h: Tensor, *weights: Tensor) -> Tensor:
    """By operations that autograd knows."""
    dense = h
    for mix, mix_bias, conv, conv_bias in _layers(weights):
        inside = F.relu(F.conv2d(dense, mix, mix_bias))
        dense = torch.cat([dense, F.relu(F.conv2d(inside, conv, conv_bias, padding=1))], dim=1)
    a, b, c = F.conv2d(dense, weights[-2], weights[-1]).chunk(3, dim=1)
    return h + a + b * torch.sigmoid(c)


def _layers(weights: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    return [weights[i : i + 4] for i in range(0, len(weights) - 2, 4)]


class _GatedDense(torch.autograd.Function):
    """Matrices have a row per point and a column per channel."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, *weights: Tensor) -> Tensor:
        growth, layers, insides = h.shape[1], _layers(weights), []
        dense = h.new_empty(h[:, 0].numel(), growth * (len(layers) + 1))
        dense[:, :growth] = _matrix(h)
        for i, (mix, mix_bias, conv, conv_bias) in enumerate(layers):
            known, new = dense[:, : growth * (i + 1)], dense[:, growth * (i + 1) : growth * (i + 2)]
            insides.append(torch.addmm(mix_bias, known, mix.flatten(1).T).relu_())
            added = F.conv2d(_image(insides[-1], h), conv, conv_bias, padding=1)
            torch.clamp_min(_matrix(added), 0, out=new)
        gate, bias = weights[-2].flatten(1), weights[-1]
        gated = torch.addmm(bias[growth:], dense, gate[growth:].T)
        out = torch.addmm(dense[:, :growth], dense, gate[:growth].T).add_(bias[:growth]).add_(F.glu(gated, 1))
        ctx.save_for_backward(h, *weights, dense, gated, *insides)
        return _image(out, h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.needs_input_grad)
        (h, *weights), (dense, gated, *insides) = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if torch.is_grad_enabled() or transformed(grad):
            return recorded_vjp(_formula, (h, *weights), ctx.needs_input_grad, grad)
        growth, gate = h.shape[1], weights[-2].flatten(1)
        back = _matrix(grad)
        to_gated = torch.ops.aten.glu_backward(back, gated, 1)
        to_gate = gate.new_empty(gate.shape)
        torch.mm(back.T, dense, out=to_gate[:growth])
        torch.mm(to_gated.T, dense, out=to_gate[growth:])
        found = [torch.cat([back.sum(0), to_gated.sum(0)]), to_gate.view_as(weights[-2])]  # the last first
        to_dense = torch.mm(to_gated, gate[growth:]).addmm_(back, gate[:growth])
        to_dense[:, :growth] += back
        for i, (mix, _, conv, _) in reversed(list(enumerate(_layers(tuple(weights))))):
            known, new = slice(growth * (i + 1)), slice(growth * (i + 1), growth * (i + 2))
            through = torch.ops.aten.threshold_backward(to_dense[:, new], dense[:, new], 0)
            inside, to_conv, to_conv_bias = torch.ops.aten.convolution_backward(
                _image(through, h),
                _image(insides[i], h),
                conv,
                [growth],
                stride=[1, 1],
                padding=[1, 1],
                dilation=[1, 1],
                transposed=False,
                output_padding=[0, 0],
                groups=1,
                output_mask=[True, True, True],
            )
            back = torch.ops.aten.threshold_backward(_matrix(inside), insides[i], 0)
            found += [to_conv_bias, to_conv, back.sum(0), (back.T @ dense[:, known]).view_as(mix)]
            to_dense[:, known].addmm_(back, mix.flatten(1))
        return _image(to_dense[:, :growth], h), *reversed(found)


def _matrix(image: Tensor) -> Tensor:
    """`(batch, C, *n)` as `(points, C)`."""
    return image.movedim(1, -1).flatten(0, -2)


def _image(matrix: Tensor, like: Tensor) -> Tensor:
    """`(points, C)` as `(batch, C, *n)`, channels last."""
    return matrix.unflatten(0, (like.shape[0], *like.shape[2:])).movedim(-1, 1)
