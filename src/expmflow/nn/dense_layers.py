"""A DenseNet as one function: its layers write into one matrix, so nothing is concatenated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow._transformed import transformed
from expmflow.nn.fused import must_record, recorded_vjp

COLUMNS = 16  # matrix products are fastest if the number of columns is a multiple of this
LARGEST_SHARE = 1 / 32  # the largest share of columns that may be padded with zeros for that


def dense_network(x: Tensor, *weights: Tensor) -> Tensor:
    """W (h + a + b·σ(c)), with h a 1×1 of x, and (a, b, c) a 1×1 of h and the outputs of all the layers.

    On the CPU, channels are last in memory. A 1×1 is then a matrix product, and the output of a layer is a few columns
    of the matrix that the next layers read. About half of what autograd would store is stored for the backward pass.

    Args:
        x: `(batch, channels, h, w)`.
        weights: the weight and bias of the first 1×1, of the 1×1 and the 3×3 of each layer, of the gate (a, b, c), and
            of the last 1×1. If the gate gives only a, b·σ(c) is omitted.
    """
    gated = len(weights[-4]) > len(weights[0])
    if x.device.type != "cpu" or not gated or must_record(x, *weights):
        return _formula(x, *weights)
    return _DenseNetwork.apply(x, *weights)


def _formula(x: Tensor, *weights: Tensor) -> Tensor:
    """The same in operations that autograd knows."""
    (first, first_bias), layers, (gate, gate_bias), (last, last_bias) = _parts(weights)
    dense = h = F.conv2d(x, first, first_bias)
    for mix, mix_bias, conv, conv_bias in layers:
        inside = F.relu(F.conv2d(dense, mix, mix_bias))
        dense = torch.cat([dense, F.relu(F.conv2d(inside, conv, conv_bias, padding=1))], dim=1)
    inside = h + gated_sum(F.conv2d(dense, gate, gate_bias), h.shape[1])
    return F.conv2d(inside, last, last_bias)


def gated_sum(x: Tensor, channels: int) -> Tensor:
    """a + b·σ(c) of the three thirds of x along axis 1, or x itself if it has `channels` channels."""
    if x.shape[1] == channels:
        return x
    a, b, c = x.chunk(3, dim=1)
    return a + b * torch.sigmoid(c)


def _parts(weights: tuple[Tensor, ...]) -> tuple[Any, list[Any], Any, Any]:
    """The parameters of the first 1×1, of each layer, of the gate, and of the last 1×1."""
    return weights[:2], [weights[i : i + 4] for i in range(2, len(weights) - 4, 4)], weights[-4:-2], weights[-2:]


class _DenseNetwork(torch.autograd.Function):
    """Matrices have a row per point and a column per channel.

    The first 1×1 is linear, and so are the gate's a and the last 1×1. So neither h nor a is computed: layers that read
    h read x instead, which has fewer channels, through a product of two small matrices, and W a becomes one more
    product of that kind. Biases are the weights of a column of ones beside x. A layer whose channels almost fill a
    round number also adds channels of zeros.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        first, layers, gate, last, last_bias = _joined(weights)
        width, growth, stem, body = len(first), _growth(layers), _stem(first), _with_residual(gate)
        head, insides, folded = _head(gate, body, last, last_bias), [], []
        dense = _beside(x, stem.shape[1], growth * len(layers))
        for known, (mix, conv, conv_bias) in enumerate(layers):
            new = slice(stem.shape[1] + growth * known, stem.shape[1] + growth * (known + 1))
            folded.append(_folded_mix(mix, stem, len(conv[0]), growth))
            insides.append((dense[:, : new.start] @ folded[-1].T).relu_())
            added = F.conv2d(_image(insides[-1], x), conv, conv_bias, padding=1)
            torch.clamp_min(_matrix(added), 0, out=dense[:, new])
        folded.append(_folded(head, stem))
        gated = dense @ folded[-1].T
        b, c, linear = gated.split([width, width, len(last)], dim=1)
        product = b.mul_(c.sigmoid_())
        ctx.save_for_backward(x, *weights, dense, gated, *insides)
        ctx.small = stem, body, head, layers, last, folded  # small, like the weights
        return _image(torch.addmm(linear, product, last.T), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.needs_input_grad)
        (x, *weights), (dense, gated, *insides) = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if torch.is_grad_enabled() or transformed(grad):
            return recorded_vjp(_formula, (x, *weights), ctx.needs_input_grad, grad)
        stem, body, head, layers, last, folded = ctx.small
        width, growth, back = len(body), _growth(layers), _matrix(grad)
        product, sigmoid, _ = gated.split([width, width, len(last)], dim=1)
        to_gated = torch.empty_like(gated)
        to_b, to_c, to_linear = to_gated.split([width, width, len(last)], dim=1)
        to_linear.copy_(back)
        to_product = back @ last
        torch.mul(to_product, sigmoid, out=to_b)
        to_product.mul_(product)
        torch.addcmul(to_product, to_product, sigmoid, value=-1, out=to_c)  # b σ' = b σ (1 − σ)
        to_stem = torch.zeros_like(stem)
        to_head = _unfolded(to_gated.T @ dense, head, stem, to_stem)
        to_rest, to_last_of_a = to_head.split([2 * width, len(last)])
        to_last = torch.addmm(to_last_of_a @ body.T, back.T, product)
        to_gate = torch.cat([last.T @ to_last_of_a, to_rest])
        to_gate = _unpad_columns(to_gate, weights[-4].shape[1], width, growth, len(layers))
        gradients = [to_last_of_a[:, 0], to_last, *_split_bias(to_gate)]  # the last first
        to_dense = to_gated @ folded[-1]
        for known in reversed(range(len(layers))):
            inside, (mix, conv, _) = insides[known], layers[known]
            new = slice(stem.shape[1] + growth * known, stem.shape[1] + growth * (known + 1))
            back = _relu_backward(to_dense[:, new], dense[:, new], 0)
            to_inside, to_conv, to_conv_bias = _conv_backward(_image(back, x), _image(inside, x), conv)
            back = _matrix(to_inside)
            _relu_backward_(back, inside, 0, grad_input=back)
            added, channels = len(weights[4 + 4 * known]), len(weights[2 + 4 * known])
            to_mix = _unfolded_mix((back.T @ dense[:, : new.start])[:channels], mix, stem, to_stem, growth)
            gradients += [to_conv_bias[:added], to_conv[:added, :channels], *to_mix]
            to_dense[:, : new.start].addmm_(back, folded[known])
        channels = x.shape[1]
        gradients += _split_bias(to_stem[1:, : channels + 1])
        shaped = (g.reshape(w.shape) for g, w in zip(reversed(gradients), weights, strict=True))
        return _image(to_dense[:, 1 : channels + 1], x), *shaped


_convolution_backward = torch.ops.aten.convolution_backward.default
_relu_backward = torch.ops.aten.threshold_backward.default
_relu_backward_ = torch.ops.aten.threshold_backward.grad_input


def _conv_backward(grad: Tensor, x: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a padded 3×3 convolution: in the input, the kernel and the bias."""
    (stride, padding, dilation), more = 3 * ([1, 1],), (False, [0, 0], 1, [True, True, True])
    return _convolution_backward(grad, x, kernel, [len(kernel)], stride, padding, dilation, *more)


def _joined(weights: tuple[Tensor, ...]) -> tuple[Tensor, list[Any], Tensor, Tensor, Tensor]:
    """Weights as matrices; those of the 1×1, except the last, with their biases as the first column.

    The 1×1 of a layer comes in two parts: the columns that read (1, h), and those that read the outputs of the layers
    before it.
    """
    first, layers, gate, (last, last_bias) = _parts(weights)
    width, growth, places = len(first[0]), 0, 0
    rest: list[Any] = []
    for mix, mix_bias, conv, conv_bias in layers:
        growth, places = len(conv), _places(len(conv))
        if places > growth:
            inside = width + places * len(rest)
            conv = F.pad(conv, (0, 0, 0, 0, 0, inside - conv.shape[1], 0, places - growth))
            conv_bias = F.pad(conv_bias, (0, places - growth))
        mix = mix.flatten(1)
        rest.append(((_join(mix[:, :width], mix_bias), mix[:, width:]), conv, conv_bias))
    return _join(*first), rest, _pad_columns(_join(*gate), width, growth, places), last.flatten(1), last_bias


def _places(growth: int) -> int:
    """The number of columns for the channels of a layer, padded if that makes a round number."""
    more = -growth % COLUMNS
    return growth + more if more <= LARGEST_SHARE * growth else growth


def _pad_columns(matrix: Tensor, width: int, growth: int, places: int) -> Tensor:
    """A matrix that reads (1, h, …), with columns of zeros after those of each layer."""
    if places == growth:
        return matrix
    layers = (matrix.shape[1] - width - 1) // growth
    columns = F.pad(matrix[:, width + 1 :].unflatten(1, (layers, growth)), (0, places - growth))
    return torch.cat([matrix[:, : width + 1], columns.flatten(1)], dim=1)


def _unpad_columns(matrix: Tensor, columns: int, width: int, places: int, layers: int) -> Tensor:
    """The inverse of `_pad_columns`: without the padding, so that `columns` remain beside the bias."""
    if matrix.shape[1] == columns + 1:
        return matrix
    rest = matrix[:, width + 1 :].unflatten(1, (layers, places))[:, :, : (columns - width) // layers]
    return torch.cat([matrix[:, : width + 1], rest.flatten(1)], dim=1)


def _growth(layers: list[Any]) -> int:
    """The number of channels that each layer adds."""
    return len(layers[0][1]) if layers else 0


def _join(weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat([bias.unsqueeze(1), weight.flatten(1)], dim=1)


def _split_bias(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The bias and the weight."""
    return matrix[:, 0], matrix[:, 1:]


def _stem(first: Tensor) -> Tensor:
    """The matrix that maps (1, x, zeros) to (1, h)."""
    width, columns = first.shape
    stem = first.new_zeros(width + 1, -(-columns // COLUMNS) * COLUMNS)
    stem[0, 0] = 1
    stem[1:, :columns] = first
    return stem


def _beside(x: Tensor, width: int, more: int) -> Tensor:
    """The matrix (1, x, zeros) of `width` columns, and `more` uninitialised ones."""
    rows, channels = _matrix(x), x.shape[1]
    dense = rows.new_empty(len(rows), width + more)
    dense[:, 0] = 1
    dense[:, 1 : channels + 1] = rows
    dense[:, channels + 1 : width] = 0
    return dense


def _with_residual(gate: Tensor) -> Tensor:
    """The matrix that maps (1, h, …) to h + a."""
    body = gate[: len(gate) // 3].clone()
    body[:, 1:].diagonal().add_(1)
    return body


def _head(gate: Tensor, body: Tensor, last: Tensor, last_bias: Tensor) -> Tensor:
    """The matrix that maps (1, h, …) to b, c and W (h + a)."""
    linear = last @ body
    linear[:, 0] += last_bias
    return torch.cat([gate[len(body) :], linear])


def _folded(matrix: Tensor, stem: Tensor) -> Tensor:
    """A matrix that reads (1, h, …), rewritten to read (1, x, zeros, …)."""
    read = len(stem)
    return torch.cat([matrix[:, :read] @ stem, matrix[:, read:]], dim=1)


def _folded_mix(mix: tuple[Tensor, Tensor], stem: Tensor, rows: int, places: int) -> Tensor:
    """The 1×1 of a layer, folded so that it reads (1, x, zeros, …), with zeros for the channels of zeros.

    In a large model a small batch has fewer entries than the weights. So each weight is copied only once.
    """
    (read, rest), width = mix, stem.shape[1]
    layers = (rows + 1 - len(stem)) // places
    folded = stem.new_zeros(rows, width + places * layers)
    filled = folded[: len(read)]
    torch.mm(read, stem, out=filled[:, :width])
    if layers:
        filled[:, width:].unflatten(1, (layers, places))[..., : rest.shape[1] // layers] = rest.unflatten(
            1, (layers, -1)
        )
    return folded


def _unfolded_mix(
    grad: Tensor, mix: tuple[Tensor, Tensor], stem: Tensor, to_stem: Tensor, places: int
) -> tuple[Tensor, Tensor]:
    """The gradients in its bias and its weight, from the gradient in the folded one; adds to `to_stem`."""
    (read, rest), (height, width) = mix, stem.shape
    to_stem.addmm_(read.T, grad[:, :width])
    bias, columns = _split_bias(grad[:, :width] @ stem.T)
    weight = grad.new_empty(len(grad), height - 1 + rest.shape[1])
    weight[:, : height - 1] = columns
    if rest.shape[1]:
        layers = (grad.shape[1] - width) // places
        added = grad[:, width:].unflatten(1, (layers, places))[..., : rest.shape[1] // layers]
        weight[:, height - 1 :].unflatten(1, (layers, -1)).copy_(added)
    return bias, weight


def _unfolded(grad: Tensor, matrix: Tensor, stem: Tensor, to_stem: Tensor) -> Tensor:
    """The gradient in that matrix, from the gradient in the folded one; adds to `to_stem`."""
    read, width = stem.shape
    to_stem.addmm_(matrix[:, :read].T, grad[:, :width])
    return torch.cat([grad[:, :width] @ stem.T, grad[:, width:]], dim=1)


def _matrix(image: Tensor) -> Tensor:
    """`(batch, C, h, w)` as `(points, C)`."""
    return image.permute(0, 2, 3, 1).flatten(0, 2)


def _image(matrix: Tensor, like: Tensor) -> Tensor:
    """`(points, C)` as `(batch, C, h, w)`, channels last."""
    batch, _, height, width = like.shape
    return matrix.unflatten(0, (batch, height, width)).permute(0, 3, 1, 2)
