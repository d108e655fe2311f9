"""A DenseNet as one function: its layers write into one matrix, so that nothing is concatenated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow.nn.fused import must_record, recorded_vjp, transformed

NARROW = 16  # matrices of fewer columns are multiplied slower than ones of so many


def dense_network(x: Tensor, *weights: Tensor) -> Tensor:
    """W (h + a + b·σ(c)), h a 1×1 of x, and (a, b, c) a 1×1 of h and of what all the layers add to it.

    On the CPU, channels are last in memory: a 1×1 is a matrix product then, and what a layer adds are a few columns of
    the matrix that the next ones read. For the backward pass about half of what autograd would keep is kept.

    Args:
        x: `(batch, channels, h, w)`.
        weights: of the first 1×1; of each layer the 1×1 and the 3×3; of the gate (a, b, c) and of the last 1×1; of each
            its weight and its bias.
    """
    if x.device.type != "cpu" or must_record(x, *weights):
        return _formula(x, *weights)
    return _DenseNetwork.apply(x, *weights)


def _formula(x: Tensor, *weights: Tensor) -> Tensor:
    """By operations that autograd knows."""
    (first, first_bias), layers, (gate, gate_bias), (last, last_bias) = _parts(weights)
    dense = h = F.conv2d(x, first, first_bias)
    for mix, mix_bias, conv, conv_bias in layers:
        inside = F.relu(F.conv2d(dense, mix, mix_bias))
        dense = torch.cat([dense, F.relu(F.conv2d(inside, conv, conv_bias, padding=1))], dim=1)
    a, b, c = F.conv2d(dense, gate, gate_bias).chunk(3, dim=1)
    return F.conv2d(h + a + b * torch.sigmoid(c), last, last_bias)


def _parts(weights: tuple[Tensor, ...]) -> tuple[Any, list[Any], Any, Any]:
    """Of the first 1×1, of each layer, of the gate, of the last 1×1."""
    return weights[:2], [weights[i : i + 4] for i in range(2, len(weights) - 4, 4)], weights[-4:-2], weights[-2:]


class _DenseNetwork(torch.autograd.Function):
    """Matrices have a row per point and a column per channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        (first, first_bias), layers, (gate, gate_bias), (last, last_bias) = _parts(weights)
        growth, insides, rows = len(first), [], _matrix(x)
        dense = x.new_empty(len(rows), growth * (len(layers) + 1))
        torch.addmm(first_bias, rows, first.flatten(1).T, out=dense[:, :growth])
        for known, (mix, mix_bias, conv, conv_bias) in enumerate(layers, 1):
            inside = torch.addmm(mix_bias, dense[:, : growth * known], mix.flatten(1).T).relu_()
            added = F.conv2d(_image(inside, x), conv, conv_bias, padding=1)
            torch.clamp_min(_matrix(added), 0, out=dense[:, growth * known : growth * (known + 1)])
            insides.append(inside)
        gated = torch.addmm(gate_bias, dense, _with_residual(gate, growth).T)
        body, b, c = gated.split(growth, dim=1)
        body.addcmul_(b, c.sigmoid_())
        ctx.save_for_backward(x, *weights, dense, gated, *insides)
        return _image(torch.addmm(last_bias, body, last.flatten(1).T), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.needs_input_grad)
        (x, *weights), (dense, gated, *insides) = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if torch.is_grad_enabled() or transformed(grad):
            return recorded_vjp(_formula, (x, *weights), ctx.needs_input_grad, grad)
        (first, _), layers, (gate, _), (last, _) = _parts(tuple(weights))
        growth, back = len(first), _matrix(grad)
        body, b, sigmoid = gated.split(growth, dim=1)
        found = [back.sum(0), (back.T @ body).view_as(last)]  # the last first
        to_gated = torch.empty_like(gated)
        to_body, to_b, to_c = to_gated.split(growth, dim=1)
        torch.mm(back, last.flatten(1), out=to_body)
        torch.mul(to_body, sigmoid, out=to_b)
        torch.mul(to_body, b, out=to_c)
        _sigmoid_backward(to_c, sigmoid, grad_input=to_c)
        found += [to_gated.sum(0), (to_gated.T @ dense).view_as(gate)]
        to_dense = torch.mm(to_gated, _with_residual(gate, growth))
        for known in range(len(layers), 0, -1):
            inside, (mix, _, conv, _) = insides[known - 1], layers[known - 1]
            new = slice(growth * known, growth * (known + 1))
            back = _relu_backward(to_dense[:, new], dense[:, new], 0)
            to_inside, to_conv, to_conv_bias = _conv_backward(_image(back, x), _image(inside, x), conv)
            back = _relu_backward(_matrix(to_inside), inside, 0)
            to_mix = (back.T @ dense[:, : growth * known]).view_as(mix)
            found += [to_conv_bias, to_conv, back.sum(0), to_mix]
            to_dense[:, : growth * known].addmm_(back, mix.flatten(1))
        to_h = to_dense[:, :growth]
        found += [to_h.sum(0), (_matrix(x).T @ to_h).T.reshape(first.shape)]
        return _image(_wide_product(to_h, first.flatten(1)), x), *reversed(found)


_convolution_backward = torch.ops.aten.convolution_backward.default
_relu_backward = torch.ops.aten.threshold_backward.default
_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input


def _conv_backward(grad: Tensor, x: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a 3×3 convolution with padding: in the input, the kernel and the bias."""
    (stride, padding, dilation), more = 3 * ([1, 1],), (False, [0, 0], 1, [True, True, True])
    return _convolution_backward(grad, x, kernel, [len(kernel)], stride, padding, dilation, *more)


def _with_residual(gate: Tensor, growth: int) -> Tensor:
    """The gate's matrix that gives (h + a, b, c)."""
    matrix = gate.flatten(1).clone()
    matrix.diagonal()[:growth].add_(1)
    return matrix


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b, with columns of zeros to b where it has few."""
    columns = b.shape[1]
    return a @ b if columns >= NARROW else (a @ F.pad(b, (0, NARROW - columns)))[:, :columns]


def _matrix(image: Tensor) -> Tensor:
    """`(batch, C, h, w)` as `(points, C)`."""
    return image.permute(0, 2, 3, 1).flatten(0, 2)


def _image(matrix: Tensor, like: Tensor) -> Tensor:
    """`(points, C)` as `(batch, C, h, w)`, channels last."""
    batch, _, height, width = like.shape
    return matrix.view(batch, height, width, matrix.shape[1]).permute(0, 3, 1, 2)
