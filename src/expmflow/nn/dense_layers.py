"""A DenseNet as one function: its layers write into one matrix, so that nothing is concatenated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow.nn.fused import must_record, recorded_vjp, transformed

LEAD = 8  # columns before the features, so that these start at a multiple of the processor's vectors; the last is 1


def dense_network(x: Tensor, *weights: Tensor) -> Tensor:
    """W (h + a + b·σ(c)), h a 1×1 of x, and (a, b, c) a 1×1 of h and of what all the layers add to it.

    On the CPU, channels are last in memory: a 1×1 is a matrix product then, and what a layer adds are a few columns of
    the matrix that the next ones read. A column of ones makes each bias a row of its weight. For the backward pass
    about half of what autograd would keep is kept.

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
        growth, insides = len(first), []
        dense = x.new_empty(x[:, 0].numel(), LEAD + growth * (len(layers) + 1))
        one, h = F.pad(first_bias, (1, 0), value=1), F.pad(first.flatten(1), (0, 0, 1, 0))
        torch.addmm(one, _matrix(x), h.T, out=dense[:, _known(growth, 0)])
        for i, (mix, mix_bias, conv, conv_bias) in enumerate(layers):
            insides.append(torch.mm(dense[:, _known(growth, i)], _with_bias(mix, mix_bias).T).relu_())
            added = F.conv2d(_image(insides[-1], x), conv, conv_bias, padding=1)
            torch.clamp_min(_matrix(added), 0, out=dense[:, _columns(growth, i + 1)])
        gated = torch.mm(dense[:, LEAD - 1 :], _with_residual(gate, gate_bias, growth).T)
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
        (first, _), layers, (gate, gate_bias), (last, _) = _parts(tuple(weights))
        growth, back = len(first), _matrix(grad)
        body, b, sigmoid = gated.split(growth, dim=1)
        found = [back.sum(0), (back.T @ body).view_as(last)]  # the last first
        to_gated = torch.empty_like(gated)
        to_body, to_b, to_c = to_gated.split(growth, dim=1)
        torch.mm(back, last.flatten(1), out=to_body)
        torch.mul(to_body, sigmoid, out=to_b)
        torch.mul(to_body, b, out=to_c)
        torch.ops.aten.sigmoid_backward.grad_input(to_c, sigmoid, grad_input=to_c)
        found += _without_bias(to_gated.T @ dense[:, LEAD - 1 :], gate)
        to_dense = torch.mm(to_gated, _with_residual(gate, gate_bias, growth)[:, 1:])
        for i, (mix, _, conv, _) in reversed(list(enumerate(layers))):
            new = slice(growth * (i + 1), growth * (i + 2))
            through = torch.ops.aten.threshold_backward(to_dense[:, new], dense[:, _columns(growth, i + 1)], 0)
            inside, to_conv, to_conv_bias = torch.ops.aten.convolution_backward(
                _image(through, x),
                _image(insides[i], x),
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
            found += [to_conv_bias, to_conv, *_without_bias(back.T @ dense[:, _known(growth, i)], mix)]
            to_dense[:, : growth * (i + 1)].addmm_(back, mix.flatten(1))
        to_h = to_dense[:, :growth]
        found += [to_h.sum(0), (to_h.T @ _matrix(x)).view_as(first)]
        return _image(to_h @ first.flatten(1), x), *reversed(found)


def _columns(growth: int, i: int) -> slice:
    """Where the features of layer i are, counted from the first 1×1."""
    return slice(LEAD + growth * i, LEAD + growth * (i + 1))


def _known(growth: int, i: int) -> slice:
    """One, and the features that layer i reads."""
    return slice(LEAD - 1, LEAD + growth * (i + 1))


def _with_bias(weight: Tensor, bias: Tensor) -> Tensor:
    """The matrix whose first column is the bias."""
    return torch.cat([bias[:, None], weight.flatten(1)], dim=1)


def _without_bias(matrix: Tensor, like: Tensor) -> list[Tensor]:
    """The gradients of the bias and of the weight out of that of the matrix of both."""
    return [matrix[:, 0], matrix[:, 1:].reshape(like.shape)]


def _with_residual(gate: Tensor, bias: Tensor, growth: int) -> Tensor:
    """The gate's matrix, bias first, that gives (h + a, b, c)."""
    matrix = _with_bias(gate, bias)
    matrix[:growth, 1 : growth + 1].diagonal().add_(1)
    return matrix


def _matrix(image: Tensor) -> Tensor:
    """`(batch, C, *n)` as `(points, C)`."""
    return image.movedim(1, -1).flatten(0, -2)


def _image(matrix: Tensor, like: Tensor) -> Tensor:
    """`(points, C)` as `(batch, C, *n)`, channels last."""
    return matrix.unflatten(0, (like.shape[0], *like.shape[2:])).movedim(-1, 1)
