"""`check_operator` passes a sound operator, and names what is wrong with an unsound one."""

from __future__ import annotations

import pytest
import torch

import expmflow as ef
from expmflow.testing import check_operator


class Diagonal(ef.LinearOperator):
    """x ↦ gain ⊙ x: what a user's first operator might look like."""

    def __init__(self, gain):
        super().__init__()
        self.gain = gain

    @property
    def parameters(self):
        return (self.gain,)

    @property
    def batch_size(self):
        return self.gain.shape[0] if self.gain.ndim == 2 else None

    def rebuild(self, parameters):
        return type(self)(*parameters)

    def apply(self, x):
        return self.gain * x

    def apply_adjoint(self, y):
        return self.gain * y

    def parameter_vjp(self, x, y):
        return ((x * y).sum(0) if self.batch_size is None else x * y,)

    def check_event_shape(self, event_shape):
        if event_shape != tuple(self.gain.shape[-1:]):
            raise ValueError(f"Expected events of shape {tuple(self.gain.shape[-1:])}; got {event_shape}.")

    def trace(self, event_shape):
        return self.gain.sum(-1)

    def _norm_bound(self, event_shape):
        return self.gain.abs().amax()

    def _log_norm_bound(self, event_shape):
        return self.gain.amax()


def mutant(**methods):
    return type("Mutant", (Diagonal,), methods)


MUTANTS = {
    "affine": (mutant(apply=lambda s, x: s.gain * x + 1), "to be linear"),
    "quadratic": (mutant(apply=lambda s, x: s.gain * x * x), "to be linear"),
    "mixes the batch": (mutant(apply=lambda s, x: s.gain * x.roll(1, 0)), "for each row of the batch"),
    "loses the shape": (mutant(apply=lambda s, x: (s.gain * x)[..., None]), "to keep the shape"),
    "loses the dtype": (mutant(apply=lambda s, x: (s.gain * x).float()), "to keep torch.float64"),
    "dense": (mutant(dense=lambda s, e: 2 * torch.diag(s.gain)), "dense to be the matrix"),
    "layout": (mutant(layout=lambda s, x: x.flip(0)), "layout to leave the values alone"),
    "adjoint": (mutant(apply_adjoint=lambda s, y: s.gain * y.flip(1)), "⟨y, A x⟩ = ⟨Aᵀ y, x⟩"),
    "trace": (mutant(trace=lambda s, e: s.gain.sum() + 1e-6), "trace to be the trace"),
    "trace of wrong shape": (mutant(trace=lambda s, e: s.gain), "a trace of shape"),
    "norm": (mutant(_norm_bound=lambda s, e: 0.999 * s.gain.abs().amax()), "norm_bound ≥ σmax"),
    "norm of wrong shape": (mutant(_norm_bound=lambda s, e: s.gain.abs()), "norm_bound to be a scalar"),
    "log-norm": (mutant(_log_norm_bound=lambda s, e: s.gain.amax() - 0.001), "log_norm_bound ≥ λmax"),
    "vjp": (mutant(parameter_vjp=lambda s, x, y: (2 * (x * y).sum(0),)), "parameter_vjp of parameter 0"),
    "vjp missing": (mutant(parameter_vjp=lambda s, x, y: (None,)), "parameter_vjp of parameter 0"),
    "vjp of wrong shape": (mutant(parameter_vjp=lambda s, x, y: (x * y,)), "a gradient of shape"),
    "vjp too long": (mutant(parameter_vjp=lambda s, x, y: ((x * y).sum(0), None)), "1 gradients"),
    "rebuild": (mutant(rebuild=lambda s, parameters: type(s)(2 * parameters[0])), "rebuild to give"),
    "scale": (mutant(scale=lambda s, c: type(s)(s.gain * abs(c))), "its negation"),
    "small scales": (mutant(scale=lambda s, c: type(s)(s.gain * max(c, 0.4) if c > 0 else s.gain * c)), "expm_apply"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3,), (4, 3)], ids=["shared", "per row"])
def test_sound_operator_passes(shape, dtype):
    gain = torch.linspace(-1.5, 1, torch.Size(shape).numel(), dtype=dtype).reshape(shape)
    check_operator(Diagonal(gain), (3,))
    check_operator(Diagonal(gain.requires_grad_()), (3,), batch=5)


@pytest.mark.parametrize("name", MUTANTS)
def test_unsound_operator_is_named(name):
    cls, message = MUTANTS[name]
    gain = torch.tensor([0.9, -0.5, 0.3], dtype=torch.float64)
    with pytest.raises(AssertionError, match=message) as failure:
        check_operator(cls(gain), (3,))
    assert str(failure.value).startswith("Expected ")
    assert "; got " in str(failure.value)


def test_without_bounds_the_exponential_is_still_compared():
    unbounded = mutant(_norm_bound=ef.LinearOperator._norm_bound, _log_norm_bound=ef.LinearOperator._log_norm_bound)
    check_operator(unbounded(torch.tensor([40.0, -2.0])), (2,))
    broken = mutant(**{**vars(unbounded), "scale": MUTANTS["small scales"][0].scale})
    with pytest.raises(AssertionError, match="expm_apply"):
        check_operator(broken(torch.tensor([0.9, -0.5])), (2,))


def test_a_bound_that_fails_is_not_a_missing_bound():
    def fail(self, event_shape):
        raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        check_operator(mutant(_norm_bound=fail)(torch.ones(2)), (2,))


def test_large_norms_pass():
    check_operator(Diagonal(torch.tensor([3000.0, -20.0])), (2,))


def test_tolerance_is_the_callers():
    rough = mutant(trace=lambda s, e: s.gain.sum() + 1e-3)(torch.tensor([0.9, -0.5], dtype=torch.float64))
    check_operator(rough, (2,), tol=1e-2)
    with pytest.raises(AssertionError, match="trace"):
        check_operator(rough, (2,), tol=1e-4)


def test_wrong_arguments():
    op = Diagonal(torch.ones(2))
    with pytest.raises(ValueError, match="Expected events of shape"):
        check_operator(op, (3,))
    with pytest.raises(ValueError, match="Expected batch of at least 1; got 0"):
        check_operator(op, (2,), batch=0)
    with pytest.raises(ValueError, match="Expected a finite tol"):
        check_operator(op, (2,), tol=float("nan"))


def test_norms_at_which_torch_loses_digits_pass():
    """torch.matrix_exp of one matrix alone is off by up to 4e-11 there, which is not the operator's fault."""
    matrix = torch.tensor([[0.01, -0.02], [0.024, 0.02]], dtype=torch.float64)
    for size in (0.2, 0.5, 1.0):
        check_operator(ef.DenseOperator(size * matrix), (2,))
