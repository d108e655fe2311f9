"""Any linear callable as an operator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from expmflow._validation import expect, expect_count, expect_finite, expect_tensor, expect_type
from expmflow.operators.base import LinearOperator

Known = float | Tensor | Callable[[tuple[int, ...]], float | Tensor]


@final
class FunctionOperator(LinearOperator):
    """x ↦ fn(x) for a callable that is linear in `x` and maps `(batch, *event)` to the same shape.

    The adjoint comes from autograd. Linearity is the caller's promise; `expmflow.testing.check_operator` tests it.

    Args:
        fn: the linear callable, of x alone; it must treat the rows of a batch alike and independently.
        parameters: every tensor that `fn` depends on and that may need a gradient; `fn` holds them itself. A tensor
            missing here would silently lose its gradient, so missing ones are detected, and the error names them.
        trace: tr A, as a number, a tensor, or a function of the event shape; computed by d products if not given.
        norm_bound: an upper bound of ‖A‖, in the same forms; without it `expm_apply` needs `terms`.
        log_norm_bound: an upper bound of λmax((A + Aᵀ)/2), in the same forms; the norm bound if not given.
        sum_length: how many rounding errors an entry of fn(x) accumulates, such as how many numbers it adds up; without
            it there is no proven bound on rounding.

    Example:
        >>> shift = FunctionOperator(lambda x: x.roll(1, dims=-1), norm_bound=1.0, trace=0.0)
        >>> shift.adjoint()(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[2., 3., 1.]])
    """

    def __init__(
        self,
        fn: Callable[[Tensor], Tensor],
        parameters: Sequence[Tensor] = (),
        *,
        trace: Known | None = None,
        norm_bound: Known | None = None,
        log_norm_bound: Known | None = None,
        sum_length: int | None = None,
    ) -> None:
        super().__init__()
        expect_type(callable(fn), "a callable", type(fn).__name__)
        for i, parameter in enumerate(parameters):
            expect_tensor(parameter, f"parameter {i}")
            expect_finite(parameter, f"parameter {i}")
        for name, bound in (("norm_bound", norm_bound), ("log_norm_bound", log_norm_bound)):
            if isinstance(bound, int | float):
                expect(bound == bound, f"{name} to be a number", bound)
        if isinstance(norm_bound, int | float):
            expect(norm_bound >= 0, "norm_bound of at least 0", norm_bound)
        if sum_length is not None:
            expect_count(sum_length, "sum_length", at_least=0)
        self.fn = fn
        self._sum_length = sum_length
        self._parameters = tuple(parameters)
        self._trace = trace
        self._norm = norm_bound
        self._log_norm = log_norm_bound
        self._complete = False

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self._parameters

    @property
    def traceable(self) -> bool:
        return False

    def rebuild(self, parameters: Sequence[Tensor]) -> FunctionOperator:
        return self  # `fn` holds its parameters itself

    def apply(self, x: Tensor) -> Tensor:
        return self.fn(x)

    def apply_adjoint(self, y: Tensor) -> Tensor:
        differentiable = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            y = y.clone() if y.is_inference() else y
            x = torch.zeros_like(y, requires_grad=True)
            product = self.fn(x)
            if not product.requires_grad:
                zero = not bool(self.fn(torch.randn_like(y)).any())
                expect(zero, "a function that autograd can follow, for its adjoint", "one whose result has no gradient")
                return torch.zeros_like(y)
            (grad,) = torch.autograd.grad(product, x, y, create_graph=differentiable, materialize_grads=True)
        return grad

    def parameter_vjp(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        needed = [p for p in self._parameters if p.requires_grad]
        if not needed:
            return (None,) * len(self._parameters)
        with torch.enable_grad():
            product = self.fn(x.detach())
            if not product.requires_grad:  # `fn` uses none of them
                return (None,) * len(self._parameters)
            grads = iter(torch.autograd.grad(product, needed, y, materialize_grads=True))
        return tuple(next(grads) if p.requires_grad else None for p in self._parameters)

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        pass  # only `fn` knows which shapes it takes

    def check_input(self, x: Tensor) -> None:
        super().check_input(x)
        if self._complete or torch.compiler.is_compiling():
            return
        with torch.inference_mode(False), torch.enable_grad():
            y = self.fn(x.clone() if x.is_inference() else x.detach())
        expect_type(isinstance(y, Tensor), "a tensor from the function", type(y).__name__)
        expect(y.shape == x.shape, f"the function to keep the shape {tuple(x.shape)}", tuple(y.shape))
        expect_type(y.dtype == x.dtype, f"the function to keep {x.dtype}", y.dtype)
        missing = _undeclared(y, self._parameters)
        names = ", ".join(_name(self.fn, tensor) for tensor in missing)
        expect(not missing, "every tensor that the function depends on in `parameters`", f"undeclared {names}")
        self._complete = True

    def trace(self, event_shape: Sequence[int]) -> Tensor:
        if self._trace is None:
            return super().trace(event_shape)
        value = self._trace(tuple(event_shape)) if callable(self._trace) else self._trace
        if isinstance(value, Tensor):
            return value
        like = self._parameters[0] if self._parameters else torch.empty(0, dtype=torch.float64)
        return torch.tensor(value, dtype=like.dtype, device=like.device)

    def sum_length(self, event_shape: Sequence[int]) -> int | None:
        return self._sum_length

    def adjoint_sum_length(self, event_shape: Sequence[int]) -> None:
        return None  # autograd computes the adjoint

    def _norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return super()._norm_bound(event_shape) if self._norm is None else _value(self._norm, event_shape)

    def _log_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return self._norm_bound(event_shape) if self._log_norm is None else _value(self._log_norm, event_shape)


def _value(known: Known, event_shape: tuple[int, ...]) -> Tensor:
    value = known(event_shape) if callable(known) else known
    return torch.as_tensor(value, dtype=torch.float64).detach()


def _undeclared(y: Tensor, declared: Sequence[Tensor]) -> list[Tensor]:
    """The leaves with gradient that `y` was computed from, other than through `declared`."""
    stop = {p.grad_fn for p in declared}
    leaves = {id(p) for p in declared}
    missing: dict[int, Tensor] = {}
    queue: list[Any] = [y.grad_fn]
    seen: set[Any] = set()
    while queue:
        node = queue.pop()
        if node is None or node in seen or node in stop:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in leaves:
            missing[id(variable)] = variable
        queue.extend(parent for parent, _ in node.next_functions)
    return list(missing.values())


def _name(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> str:
    """The name that the caller's code gives this tensor, as far as the function reveals it."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    holders: list[tuple[str, object]] = [("", fn), ("", getattr(fn, "__self__", None))]
    if inspect.isfunction(fn):
        variables = inspect.getclosurevars(fn)
        holders += [*variables.nonlocals.items(), *variables.globals.items()]
    for name, holder in holders:
        if holder is tensor:
            return f"`{name}`"
        if isinstance(holder, torch.nn.Module):
            for path, parameter in holder.named_parameters():
                if parameter is tensor:
                    return f"`{name}.{path}`" if name else f"`{path}`"
    return f"tensor of shape {tuple(tensor.shape)}"
