"""The layers of a DenseNet in one matrix: the plain formula, its gradients, and half of what autograd would keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expmflow.nn import DenseBlock, DenseNet, dense_layers
from expmflow.nn.context import offset
from expmflow.nn.dense_layers import dense_network
from transform_registry import draw, randomise


def arguments(
    depth: int,
    batch: int = 2,
    size: tuple[int, int] = (4, 5),
    growth: int = 3,
    channels: int = 2,
    *,
    width: int | None = None,
    gated: bool = True,
) -> list[Tensor]:
    """x and the weights of all layers, each with a gradient."""
    width = growth if width is None else width
    gate = width * 3 if gated else width
    shapes = [(gate, width + growth * depth, 1, 1), (gate,), (4, width, 1, 1), (4,)]
    for i in reversed(range(depth)):
        before = width + growth * i
        shapes = [(before, before, 1, 1), (before,), (growth, before, 3, 3), (growth,), *shapes]
    shapes = [(width, channels, 1, 1), (width,), *shapes]
    given = [draw("x", batch, channels, *size), *(draw(f"weight {k}", *shape) / 2 for k, shape in enumerate(shapes))]
    return [t.requires_grad_() for t in given]


def gradients(function, given: list[Tensor]) -> tuple[Tensor, ...]:
    out = function(*given)
    return out, *torch.autograd.grad((out * draw("direction", *out.shape)).sum(), given)


@pytest.mark.parametrize("channels", [1, 15, 16, 33])
def test_whatever_the_number_of_channels(channels):
    """Beside x is a column of ones, and columns of zeros up to a multiple of sixteen, of which there may be none."""
    given = arguments(2, channels=channels)
    found, expected = gradients(dense_network, given), gradients(dense_layers._formula, given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("width", [1, 2, 7, 16])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_whatever_the_width(depth, width):
    given = arguments(depth, width=width)
    found, expected = gradients(dense_network, given), gradients(dense_layers._formula, given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(("growth", "places"), [(16, 16), (29, 29), (47, 48), (62, 62), (63, 64), (80, 80)])
def test_whatever_the_growth(growth, places):
    """Just below a multiple of sixteen there are channels of zeros, which nobody sees."""
    assert dense_layers._places(growth) == places
    for depth in (0, 1, 3):
        given = arguments(depth, 1, (2, 2), growth, width=5)
        found, expected = gradients(dense_network, given), gradients(dense_layers._formula, given)
        scale = max(float(t.detach().abs().max()) for t in expected)
        for ours, formula in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, formula, rtol=1e-11, atol=1e-13 * scale)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_gate_that_is_shut_is_no_gate(depth):
    """b = 0 leaves h + a."""
    given = [t.detach() for t in arguments(depth, width=4)]
    plain = [*given[:-4], given[-4][:4], given[-3][:4], *given[-2:]]
    shut = [*given[:-4], given[-4].clone(), given[-3].clone(), *given[-2:]]
    for tensor in shut[-4:-2]:
        tensor[4:8] = 0
    torch.testing.assert_close(dense_network(*plain), dense_network(*shut), rtol=1e-12, atol=1e-12)


def test_a_block_is_the_inside_of_a_network():
    """With an identity around it, and without the residual connection."""
    torch.manual_seed(0)
    net = DenseNet(4, 4, growth=3, depth=2, width=4).double()
    block = DenseBlock(4, 4, growth=3, depth=2).double()
    with torch.no_grad():
        for convolution in (net.first, net.last):
            convolution.weight.copy_(torch.eye(4)[..., None, None])
            convolution.bias.zero_()
    block.load_state_dict({k: v for k, v in net.state_dict().items() if k.startswith(("layers", "gate"))})
    x = draw("x", 2, 4, 5, 3)
    torch.testing.assert_close(x + block(x), net(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("batch", "size"), [(2, (4, 5)), (1, (1, 1)), (3, (1, 4)), (0, (4, 4))])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_one_matrix_is_the_formula(depth, batch, size, layout):
    given = arguments(depth, batch, size)
    given[0] = given[0].detach().to(memory_format=layout).requires_grad_()
    found, expected = gradients(dense_network, given), gradients(dense_layers._formula, given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)


def test_gradients_by_finite_differences():
    given = arguments(2, 1, (3, 3))
    assert torch.autograd.gradcheck(dense_network, given)
    assert torch.autograd.gradgradcheck(dense_network, given, fast_mode=True)


@pytest.mark.parametrize("needed", [(0,), (1,), (0, 4), (-1,)])
def test_gradients_of_some_arguments_only(needed):
    given = [t.detach() for t in arguments(2)]
    leaves = [given[k].requires_grad_() for k in needed]
    for create_graph in (False, True):
        found = torch.autograd.grad(dense_network(*given).square().sum(), leaves, create_graph=create_graph)
        expected = torch.autograd.grad(dense_layers._formula(*given).square().sum(), leaves)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)


def test_nothing_received_is_written_to():
    given = arguments(2)
    before = [t.detach().clone() for t in given]
    out = dense_network(*given)
    direction = draw("direction", *out.shape)
    out.backward(direction)
    assert all(torch.equal(old, new) for old, new in zip(before, given, strict=True))
    assert torch.equal(direction, draw("direction", *out.shape))


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script` is deprecated")
def test_function_transforms():
    torch.manual_seed(0)
    net = DenseNet(2, 3, growth=4).double()
    randomise(net)
    x = draw("x", 2, 2, 3, 3)
    one = torch.stack([torch.autograd.functional.jacobian(lambda x: net(x[None])[0], row) for row in x])
    for mode in (torch.func.jacrev, torch.func.jacfwd):
        found = torch.func.vmap(mode(lambda x: net(x[None])[0]))(x)
        torch.testing.assert_close(found, one, rtol=0, atol=1e-12)
    batched = torch.autograd.functional.jacobian(lambda x: net(x[None])[0], x[0], vectorize=True)
    torch.testing.assert_close(batched, one[0], rtol=0, atol=1e-12)


def test_half_is_kept_for_the_backward_pass():
    def kept(function) -> int:
        given = arguments(2, growth=32)
        sizes = {t.data_ptr(): 0 for t in given}

        def pack(tensor: Tensor) -> Tensor:
            sizes.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(*given)
        return sum(sizes.values())

    assert kept(dense_network) <= 0.65 * kept(dense_layers._formula)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4, 5)], ids=["vectors", "images"])
def test_a_context_is_added_to_the_first_features(shape):
    net = DenseNet(2, 4, growth=5, context_channels=3).double()
    randomise(net)
    x, context = draw("x", 2, 2, 4, 5), draw("context", *shape)
    h = net.first(x) + offset(net.context, context, x.ndim)
    layers = [part for layer in net.layers for part in (layer[0], layer[2])]
    others = [tensor for part in (*layers, net.gate, net.last) for tensor in (part.weight, part.bias)]
    same = torch.eye(5, dtype=h.dtype)[..., None, None]
    expected = dense_layers._formula(h, same, torch.zeros(5, dtype=h.dtype), *others)
    torch.testing.assert_close(net(x, context), expected, rtol=1e-12, atol=1e-12)
