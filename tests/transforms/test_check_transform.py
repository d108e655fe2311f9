"""`check_transform` passes a sound layer, and names what is wrong with an unsound one."""

from __future__ import annotations

import pytest
import torch

from expmflow import transforms as T
from expmflow.testing import check_transform

X = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(4, 3).sin()


class Bend(T.Transform):
    """z = a·sinh(x) + context: what a user's first layer might look like."""

    def __init__(self):
        super().__init__()
        self.log_gain = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64))

    def _forward(self, x, context):
        shift = 0 if context is None else context
        return self.log_gain.exp() * x.sinh() + shift, self.logdet(x)

    def _inverse(self, z, context):
        x = ((z if context is None else z - context) * (-self.log_gain).exp()).asinh()
        return x, -self.logdet(x)

    def logdet(self, x):
        return (self.log_gain + x.cosh().log()).sum(1)


def mutant(forward=None, inverse=None):
    """A layer that first bends, then does something wrong to what it was given and what it would return."""

    class Mutant(Bend):
        def _forward(self, x, context):
            return forward(x, *super()._forward(x, context)) if forward else super()._forward(x, context)

        def _inverse(self, z, context):
            return inverse(z, *super()._inverse(z, context)) if inverse else super()._inverse(z, context)

    return Mutant


def writes_to(x, out, logdet):
    x.mul_(0.5)
    return out, logdet


MISTAKES = {
    "entries lost": (lambda x, out, logdet: (out[:, :2], logdet), r"4 rows of 3 entries"),
    "logdet per entry": (lambda x, out, logdet: (out, logdet[:, None].expand(-1, 3)), r"logdet of shape \(4,\)"),
    "logdet summed": (lambda x, out, logdet: (out, logdet.sum()), r"logdet of shape \(4,\)"),
    "output dtype": (lambda x, out, logdet: (out.float(), logdet), r"an output of dtype torch\.float64"),
    "logdet dtype": (lambda x, out, logdet: (out, logdet.float()), r"logdet of dtype torch\.float64"),
    "not finite": (lambda x, out, logdet: (out, logdet / 0), r"logdet that is finite"),
    "writes to its input": (writes_to, r"what it receives to be left as it is"),
    "rows mixed": (
        lambda x, out, logdet: (out + 1e-6 * x.mean(0), logdet),
        r"rows of a batch that do not see each other",
    ),
    "rows by place": (
        lambda x, out, logdet: (out + 1e-6 * torch.arange(len(x))[:, None], logdet),
        r"rows of a batch that do not see each other",
    ),
    "logdet by companions": (lambda x, out, logdet: (out, logdet + 1e-6 * len(x)), r"rows of a batch that do not see"),
    "sign of logdet": (lambda x, out, logdet: (out, -logdet), r"logdet = log \|det\| of the Jacobian"),
    "logdet off": (lambda x, out, logdet: (out, logdet + 1e-8), r"logdet = log \|det\| of the Jacobian"),
    "scaled": (lambda x, out, logdet: (out * (1 + 1e-9), logdet), r"logdet = log \|det\| of the Jacobian|to undo it"),
    "shifted": (lambda x, out, logdet: (out + 1e-9, logdet), r"to undo it"),
    "no gradient": (lambda x, out, logdet: (out.detach(), logdet), r"logdet = log \|det\| of the Jacobian"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("context", [None, X[:, :1], X[0]], ids=["none", "per row", "shared"])
def test_sound_layer_passes(context, dtype):
    check_transform(Bend().to(dtype), X.to(dtype), None if context is None else context.to(dtype))


@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_named(name, direction):
    mistake, message = MISTAKES[name]
    broken = mutant(**{direction: mistake})()
    sentence = rf"^Mutant\.(forward|inverse): Expected .*({message}).*; got .*\.$"
    with pytest.raises(AssertionError, match=sentence):
        check_transform(broken, X)


def test_both_signs_wrong_is_seen():
    """A log-determinant that is wrong in both directions cancels in a round trip."""
    with pytest.raises(AssertionError, match=r"^Mutant\.forward: Expected logdet = log \|det\|"):
        check_transform(mutant(MISTAKES["sign of logdet"][0], MISTAKES["sign of logdet"][0])(), X)


def test_dtype_of_float32_is_seen():
    def promote(x, out, logdet):
        return out, logdet + torch.zeros(len(x), dtype=torch.float64)

    with pytest.raises(AssertionError, match=r"^Mutant\.forward: Expected float32 to stay float32; got"):
        check_transform(mutant(promote)(), X)


def test_context_is_left_alone():
    class Greedy(Bend):
        def _forward(self, x, context):
            context["shift"].add_(1)
            return super()._forward(x, None)

        def _inverse(self, z, context):
            return super()._inverse(z, None)

    with pytest.raises(AssertionError, match=r"^Greedy\.forward: Expected what it receives to be left as it is"):
        check_transform(Greedy(), X, {"shift": torch.zeros(3), "others": [torch.zeros(3)]})


def test_a_layer_is_tested_by_a_copy():
    layer = T.ActNorm(3).double().train()
    check_transform(layer, X)
    assert layer.training
    assert not layer.initialised
    assert all(p.grad is None for p in layer.parameters())


def test_tolerance_is_the_callers():
    rough = mutant(MISTAKES["logdet off"][0])()
    check_transform(rough, X, tol=1e-6)
    with pytest.raises(AssertionError, match="logdet"):
        check_transform(rough, X, tol=1e-10)


def test_layers_that_change_the_shape_pass():
    check_transform(T.Squeeze(), X.reshape(3, 1, 2, 2))


def test_wrong_arguments():
    with pytest.raises(ValueError, match="Expected at least two rows"):
        check_transform(Bend(), X[:1])
    with pytest.raises(TypeError, match="Expected the input to be a tensor; got list"):
        check_transform(Bend(), [[1.0, 2.0, 3.0]])
    with pytest.raises(ValueError, match="Expected a finite tol"):
        check_transform(Bend(), X, tol=float("nan"))
