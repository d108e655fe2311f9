"""Residual blocks: z = x + g(x) with a contraction g (Behrmann et al., 2019; Chen et al., 2019).

With J the Jacobian of g, log det(I + J) = Σ_{k≥1} (−1)^{k+1}/k · tr Jᵏ, and its gradient is
tr((I + J)⁻¹ ∂J) = Σ_{k≥0} (−1)^k tr(Jᵏ ∂J). Both are estimated without bias, from products vᵀJᵏ with one vector v of
random signs, and from a random number N of terms after the first m: term k > m is included if N ≥ k − m, and divided by
the probability of that.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from expmflow._transformed import batched, transformed
from expmflow._validation import expect, expect_count, expect_one_of, expect_unexported, expect_untraced
from expmflow.nn.constraints import constant_constraints, constraint_has_seen, update_constraint
from expmflow.nn.lipschitz import constrain_lipschitz, lipschitz_bound, shape_at_weights
from expmflow.numerics import ConvergenceError, fixed_point
from expmflow.numerics.solve import with_implicit_gradient
from expmflow.transforms.base import Output, Transform, layer_name
from expmflow.transforms.randomness import poisson, signs

LogdetKind = Literal["estimate", "exact"]


@final
class ResidualBlock(Transform):
    """z = x + g(x) around a network g with a Lipschitz constant of at most `coeff` < 1.

    The log-determinant is an unbiased random estimate: `training_terms` (in evaluation `evaluation_terms`) terms of its
    series, then a Poisson-distributed number of further terms, each of which takes a product with the Jacobian. The
    layer returns this estimate. Its gradient is the Neumann estimate of the log-determinant's gradient, also unbiased,
    which takes one product recorded by autograd, so memory does not grow with the terms. In training the number of
    terms is drawn once for a batch, since each costs a pass; in evaluation for each row. `T.keyed_draws` controls the
    random numbers. `logdet="exact"` computes the whole Jacobian, d² entries a row, by d products: for small events.

    The forward direction is closed-form. The inverse iterates x ← z − g(x). Its residual is verified, and its gradient
    is exact, by the implicit function theorem.

    Args:
        net: g, from `(batch, *event)` to the same shape: `LipschitzConvNet` or `LipschitzMLP` of `expmflow.nn`, or your
            own `nn.Sequential` of convolutions, linear maps and activations with a Lipschitz constant of at most one.
            The block constrains each weight so that the product of the norms is at most `coeff`. The norms come from
            eigenvalues at every frequency, recomputed whenever the weights change. Any other part must state its
            Lipschitz constant in a method `lipschitz_bound()`.
        coeff: the largest Lipschitz constant of g, in the 2-norm.
        logdet: `"estimate"` or `"exact"`; the attribute may be changed at any time.
        training_terms, evaluation_terms: the number of terms before the random ones.
        rate: the mean of the Poisson distribution.
        tol, max_iterations: of the inverse, as for `fixed_point`.

    Example:
        >>> layer = T.ResidualBlock(expmflow.nn.LipschitzConvNet(4, hidden=16))
        >>> z, logdet = layer(torch.randn(2, 4, 8, 8))
        >>> x, _ = layer.eval().inverse(z)
    """

    closed_form: ClassVar[tuple[str, ...]] = ("forward",)

    def __init__(
        self,
        net: nn.Module,
        coeff: float = 0.98,
        *,
        logdet: LogdetKind = "estimate",
        training_terms: int = 2,
        evaluation_terms: int = 20,
        rate: float = 2.0,
        tol: float | None = None,
        max_iterations: int = 1000,
    ) -> None:
        super().__init__()
        expect_one_of(logdet, ("estimate", "exact"), "logdet")
        expect_count(training_terms, "training_terms")
        expect_count(evaluation_terms, "evaluation_terms")
        expect_count(max_iterations, "max_iterations")
        expect(rate > 0, "a positive rate", rate)
        self.net = net
        self.coeff = coeff
        self.logdet = logdet
        self.training_terms, self.evaluation_terms, self.rate = training_terms, evaluation_terms, rate
        self.tol, self.max_iterations, self.last_iterations = tol, max_iterations, 0
        self._weighted = tuple(constrain_lipschitz(net, coeff))  # a tuple, so not registered here
        self._in_place = any(getattr(part, "inplace", False) for part in net.modules())

    @property
    def exact_logdet(self) -> bool:  # type: ignore[override]
        """Whether the log-determinant is exact, not an estimate."""
        return self.logdet == "exact"

    def lipschitz_bound(self) -> float:
        """A certified bound on the current Lipschitz constant of g, from the singular values at all frequencies."""
        return lipschitz_bound(self.net)

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        shape = shape_at_weights(self.net, event_shape)
        if shape is None:
            return
        first = self._weighted[0]
        if isinstance(first, nn.Linear):
            fits = shape[-1] == first.in_features
            expect(fits, f"{first.in_features} features on the last axis", f"events {shape}")
        elif isinstance(first, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            dims = len(first.kernel_size)
            fits = len(shape) == dims + 1 and shape[0] == first.in_channels
            expect(fits, f"events of {first.in_channels} channels and {dims} axes", shape)

    def check_context(self, context: Any, x: Tensor) -> None:
        check = getattr(self.net, "check_context", None)
        if check is not None:
            check(context, x)

    def _forward(self, x: Tensor, context: Any) -> Output:
        self._follow_weights(x)
        value, logdet = self._value_and_logdet(x, context)
        return x + value, logdet

    def _inverse(self, z: Tensor, context: Any) -> Output:
        self._follow_weights(z)
        x = self._solve(z, context)
        _, logdet = self._value_and_logdet(x, context)
        return x, -logdet

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # an eigenvalue problem gains nothing from it
    def _follow_weights(self, x: Tensor) -> None:
        """Update the constraints to the current weights; in evaluation, only if these have changed."""
        expect_unexported("a log-determinant that is made of gradients")
        if any(transformed(p) for p in self.net.parameters()):
            return
        if transformed(x):  # buffers cannot be written here
            seen = all(constraint_has_seen(layer, "weight") for layer in self._weighted)
            self._expect(seen, "a pass outside torch.func first, in which constraints see the weights", "none")
            return
        with nullcontext() if self.training else constant_constraints():
            for layer in self._weighted:
                update_constraint(layer, "weight", tuple(x.shape[1:]), settle=True)

    def _g(self, x: Tensor, context: Any) -> Tensor:
        seen = x.clone() if self._in_place else x  # the network may write into its input
        value = self.net(seen, context) if getattr(self.net, "context_channels", 0) else self.net(seen)
        fits = value.shape == x.shape
        self._expect(fits, f"a network that gives the shape {tuple(x.shape)} back", tuple(value.shape))
        return value

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # autograd inside a layer is not for the compiler
    def _value_and_logdet(self, x: Tensor, context: Any) -> Output:
        """g(x) and log det(I + J), recorded if the caller records."""
        expect_untraced("a residual block, whose log-determinant is made of gradients")
        self._expect(not batched(x), "one batch of rows, as log-determinants are made of gradients", "torch.vmap")
        known = x.requires_grad or not transformed(x)
        self._expect(known, "torch.func.jacrev, as log-determinants are made of gradients", "a derivative forwards")
        record = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            if record and x.requires_grad:
                x = x.view_as(x)  # the same tensor, without the hooks of the inverse
            else:
                x = (x.clone() if x.is_inference() else x).detach().requires_grad_()
            value = self._g(x, context)
            logdet = self._exact(value, x, record) if self.exact_logdet else self._estimate(value, x, record)
        return (value, logdet) if record else (value.detach(), logdet.detach())

    def _estimate(self, value: Tensor, x: Tensor, record: bool) -> Tensor:
        exact = self.training_terms if self.training else self.evaluation_terms
        counts = poisson(self, self.rate, x.shape[0], per_row=not self.training)
        last = exact + int(counts.max()) if len(counts) else 0
        v = signs(self, x)
        row = neumann = v
        logdet = x.new_zeros(x.shape[0])
        for k in range(1, last + 1):
            row = _vjp(value, x, row)
            weights = (counts >= k - exact) / _at_least(k - exact, self.rate)
            signed = (-1) ** k * weights.to(x).reshape(-1, *(1,) * (x.ndim - 1)) * row
            logdet = logdet - (signed * v).flatten(1).sum(1) / k
            neumann = neumann + signed
        if not record:
            return logdet
        gradient = (_vjp(value, x, neumann, record=True) * v).flatten(1).sum(1)  # neumann ∂J v, differentiated once
        return logdet + gradient - gradient.detach()

    def _exact(self, value: Tensor, x: Tensor, record: bool) -> Tensor:
        size = x.shape[1:].numel()
        units = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, 1, *x.shape[1:])
        rows = [_vjp(value, x, unit.expand_as(x), record=record).flatten(1) for unit in units]
        jacobian = torch.stack(rows, dim=1)
        return torch.linalg.slogdet(jacobian + torch.eye(size, dtype=x.dtype, device=x.device)).logabsdet

    def _solve(self, z: Tensor, context: Any) -> Tensor:
        """x with x + g(x) = z; no gradient passes through the iterations."""
        per_row = isinstance(context, Tensor)

        def g(x: Tensor, rows: Tensor) -> Tensor:
            return self._g(x, context[rows] if per_row else context)

        try:
            with torch.no_grad():
                solution = fixed_point(g, z.detach(), tol=self.tol, max_iterations=self.max_iterations, pass_rows=True)
        except ConvergenceError as error:
            raise ConvergenceError(f"{layer_name(self)}: {error}", error.solution) from None
        self.last_iterations = solution.iterations
        if not torch.is_grad_enabled():
            return solution.value

        def value(x: Tensor) -> tuple[Tensor, Tensor]:
            return self._g(x, context), torch.zeros_like(x)  # the diagonal is unknown

        return with_implicit_gradient(value, solution.value, z, max_iterations=self.max_iterations)


def _vjp(value: Tensor, x: Tensor, row: Tensor, *, record: bool = False) -> Tensor:
    """rowᵀ J."""
    return torch.autograd.grad(value, x, row, retain_graph=True, create_graph=record, materialize_grads=True)[0]


def _at_least(k: int, rate: float) -> float:
    """P(N ≥ k) of a Poisson-distributed N."""
    if k <= 0:
        return 1.0
    return float(torch.special.gammainc(torch.tensor(k, dtype=torch.float64), torch.tensor(rate, dtype=torch.float64)))
