"""Messages summed block by block: the plain formula, its gradients, and memory that does not grow with the pairs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from expmflow.nn import GraphNetwork, messages
from expmflow.nn.messages import sum_messages
from transform_registry import draw, randomise

F64 = torch.float64
HIDDEN = 3
SHAPES = {"several": (5, 4), "one node": (3, 1), "one graph": (1, 5), "empty batch": (0, 4), "no nodes": (2, 0)}


def pair_by_pair(adjacency: Tensor, receive: Tensor, send: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Σ_j A_ij relu(W relu(r_i + s_j) + b) with no tensor operation across nodes."""
    rows, nodes, _ = receive.shape
    graphs = adjacency if adjacency.ndim == 3 else adjacency.expand(rows, nodes, nodes)
    out = 0 * (receive + send + bias + weight.sum())
    for g, i, j in itertools.product(range(rows), range(nodes), range(nodes)):
        inner = torch.relu(receive[g, i] + send[g, j])
        message = torch.zeros_like(out)
        message[g, i] = graphs[g, i, j] * torch.relu(weight @ inner + bias)
        out = out + message
    return out


def arguments(rows: int, nodes: int, *, batched: bool) -> tuple[Tensor, ...]:
    """A directed graph with weights and self-loops; everything but the graph has a gradient."""
    adjacency = draw("adjacency", rows, nodes, nodes) if batched else draw("adjacency", nodes, nodes)
    receive, send = draw("receive", rows, nodes, HIDDEN), draw("send", rows, nodes, HIDDEN)
    weight, bias = draw("weight", HIDDEN, HIDDEN), draw("bias", HIDDEN)
    return adjacency.abs(), *(t.requires_grad_() for t in (receive, send, weight, bias))


def gradients(function, given: tuple[Tensor, ...], graph: bool = False) -> tuple[Tensor, ...]:
    """The value, and the gradients of a generic linear function of it."""
    out = function(*given)
    leaves = given if graph else given[1:]
    return out, *torch.autograd.grad((out * draw("direction", *out.shape)).sum(), leaves)


@pytest.mark.parametrize("batched", [False, True], ids=["one graph for all", "a graph each"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pairs", [1, 33, 48, 4096])  # of 5 graphs with 16 pairs each: 1 at a time, 2, 3, all
def test_blocks_add_up_to_the_formula(monkeypatch, pairs, shape, batched):
    monkeypatch.setattr(messages, "PAIRS", pairs)
    given = arguments(*SHAPES[shape], batched=batched)
    found, expected = gradients(sum_messages, given), gradients(pair_by_pair, given)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("batched", [False, True])
def test_gradients_by_finite_differences(monkeypatch, batched):
    monkeypatch.setattr(messages, "PAIRS", 20)  # two graphs at a time
    given = arguments(3, 3, batched=batched)
    assert torch.autograd.gradcheck(sum_messages, given)
    assert torch.autograd.gradgradcheck(sum_messages, given, fast_mode=True)


@pytest.mark.parametrize("batched", [False, True])
def test_a_graph_with_a_gradient(batched):
    adjacency, *rest = arguments(3, 4, batched=batched)
    given = (adjacency.requires_grad_(), *rest)
    found, expected = gradients(sum_messages, given, graph=True), gradients(pair_by_pair, given, graph=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("needed", [(1,), (2,), (3,), (4,), (1, 4)])
def test_gradients_of_some_arguments_only(needed):
    given = [t.detach().requires_grad_(k in needed) for k, t in enumerate(arguments(3, 4, batched=False))]
    leaves = [given[k] for k in needed]
    for create_graph in (False, True):
        found = torch.autograd.grad(sum_messages(*given).square().sum(), leaves, create_graph=create_graph)
        expected = torch.autograd.grad(pair_by_pair(*given).square().sum(), leaves)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_arguments_that_are_views():
    """Transposed and expanded tensors, and a gradient that is one number everywhere."""
    adjacency, receive, send, weight, bias = (t.detach() for t in arguments(5, 4, batched=True))
    views = (
        adjacency.mT,
        receive.transpose(0, 1).contiguous().transpose(0, 1),
        send[:1].expand(5, 4, 3),
        weight.T,
        bias,
    )
    given = tuple(v if k == 0 else v.requires_grad_() for k, v in enumerate(views))
    whole = tuple(
        v.detach().clone(memory_format=torch.contiguous_format).requires_grad_(k > 0) for k, v in enumerate(views)
    )
    found = torch.autograd.grad(sum_messages(*given).sum(), given[1:])
    expected = torch.autograd.grad(pair_by_pair(*whole).sum(), whole[1:])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_nothing_received_is_written_to():
    given = arguments(5, 4, batched=True)
    before = [t.detach().clone() for t in given]
    out = sum_messages(*given)
    direction = draw("direction", *out.shape)
    out.backward(direction)
    assert all(torch.equal(old, new) for old, new in zip(before, given, strict=True))
    assert torch.equal(direction, draw("direction", *out.shape))


@pytest.mark.filterwarnings(r"ignore:<class 'torch\.autograd\.function\.Function'> should not be instantiated")
def test_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(sum_messages, backend="aot_eager", fullgraph=True)
    given = arguments(3, 4, batched=True)
    torch.testing.assert_close(gradients(compiled, given), gradients(sum_messages, given), rtol=0, atol=1e-12)
    torch._dynamo.reset()


class TestFunctionTransforms:
    """`torch.func` over a network sees the same function, derivative by derivative."""

    def made(self) -> tuple[GraphNetwork, Tensor, Tensor]:
        torch.manual_seed(0)
        net = GraphNetwork(2, 3, hidden=4).double()
        randomise(net)
        return net, draw("nodes", 3, 4, 2), draw("graphs", 3, 4, 4).abs()

    def jacobian(self, net: GraphNetwork, x: Tensor, graph: Tensor) -> Tensor:
        """`(N, out, N, in)` of one graph, by one backward pass per output."""
        return torch.autograd.functional.jacobian(lambda x: net(x[None], graph)[0], x)

    @pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script` is deprecated")  # torch's own, inside jacfwd
    @pytest.mark.parametrize("mode", [torch.func.jacrev, torch.func.jacfwd])
    def test_jacobians(self, mode):
        net, x, graphs = self.made()
        found = torch.func.vmap(mode(lambda x, graph: net(x[None], graph)[0]))(x, graphs)
        expected = torch.stack([self.jacobian(net, *one) for one in zip(x, graphs, strict=True)])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

    def test_gradients_of_each_row(self):
        net, x, graphs = self.made()
        weights = dict(net.named_parameters())

        def loss(weights, x, graph):
            return torch.func.functional_call(net, weights, (x[None], graph)).square().sum()

        found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, graphs)
        for k in range(3):
            expected = torch.autograd.grad(loss(weights, x[k], graphs[k]), list(weights.values()))
            for name, value in zip(weights, expected, strict=True):
                torch.testing.assert_close(found[name][k], value, rtol=0, atol=1e-11)

    def test_jacobians_in_one_batched_backward_pass(self):
        net, x, graphs = self.made()
        found = torch.autograd.functional.jacobian(lambda x: net(x[None], graphs[0])[0], x[0], vectorize=True)
        torch.testing.assert_close(found, self.jacobian(net, x[0], graphs[0]), rtol=0, atol=1e-12)

    @pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script` is deprecated")
    def test_second_derivatives(self):
        """A penalty on a gradient trains."""
        net, x, graphs = self.made()
        hessian = torch.autograd.functional.hessian(lambda x: net(x, graphs).square().sum(), x)
        expected = torch.func.hessian(lambda x: net(x, graphs).square().sum())(x)
        torch.testing.assert_close(hessian, expected, rtol=0, atol=1e-10)


class TestMemory:
    def kept(self, function, nodes: int) -> int:
        """Bytes that autograd keeps for the backward pass, beside the arguments."""
        given = arguments(2, nodes, batched=False)
        known = {t.data_ptr() for t in given}
        sizes = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(0 if tensor.data_ptr() in known else tensor.numel() * tensor.itemsize)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(*given)
        assert sizes
        return sum(sizes)

    def test_only_the_arguments_are_kept_for_the_backward_pass(self, monkeypatch):
        monkeypatch.setattr(messages, "KEPT", 2 * 8**2 * HIDDEN - 1)
        assert self.kept(sum_messages, 8) == self.kept(sum_messages, 32) == 0

    def test_or_of_few_pairs_a_byte_for_each_feature(self):
        assert self.kept(sum_messages, 8) == 2 * 8**2 * HIDDEN

    def test_where_the_formula_keeps_features_of_every_pair(self, monkeypatch):
        monkeypatch.setattr(messages, "_plain", lambda *tensors: True)
        assert self.kept(sum_messages, 8) >= 8 * 2 * 8**2 * HIDDEN
        assert self.kept(sum_messages, 32) >= 8 * 2 * 32**2 * HIDDEN

    @pytest.mark.parametrize("batched", [False, True])
    def test_the_gradient_is_the_same(self, monkeypatch, batched):
        found = []
        for limit in (0, messages.KEPT):
            monkeypatch.setattr(messages, "KEPT", limit)
            given = arguments(3, 5, batched=batched)
            out = sum_messages(*given)
            found.append(torch.autograd.grad((out * draw("direction", *out.shape)).sum(), given[1:]))
        for made_again, kept in zip(*found, strict=True):
            assert torch.equal(made_again, kept)

    def test_work_space_does_not_grow_with_the_batch(self, monkeypatch):
        monkeypatch.setattr(messages, "PAIRS", 40)
        for rows in (2, 3, 50):
            blocks = list(messages._blocks(draw("x", rows, 4, HIDDEN), 2))
            assert {buffer.shape[1:] for _, *buffers in blocks for buffer in buffers} == {(4, 4, HIDDEN)}
            assert max(first.shape[0] for _, first, _ in blocks) == 2  # 32 pairs; three graphs would be 48
            assert len({first.data_ptr() for _, first, _ in blocks}) == 1
            covered = [k for place, *_ in blocks for k in range(place.start, place.stop)]
            assert covered == list(range(rows))


def test_mixed_precision():
    """In bfloat16 the result is that of float32 to the digits there are, and gradients arrive."""
    given = tuple(t.detach().float().requires_grad_(k > 0) for k, t in enumerate(arguments(5, 4, batched=True)))
    exact = gradients(sum_messages, tuple(t.detach().double().requires_grad_(k > 0) for k, t in enumerate(given)))
    with torch.autocast("cpu", torch.bfloat16):
        out = sum_messages(*given)
    coarse = (out, *torch.autograd.grad((out * draw("direction", *out.shape)).sum(), given[1:]))
    for found, expected in zip(coarse, exact, strict=True):
        assert (found.double() - expected).norm() <= 0.05 * expected.norm()
