"""The test for your own invertible layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expmflow._validation import expect, expect_tensor
from expmflow.numerics.plan import check_tol
from expmflow.transforms import Transform
from expmflow.transforms.base import layer_name

__all__ = ["check_transform"]

_ROUNDINGS = 1000  # how many spacings of the dtype count as rounding: a layer or its inverse may amplify them


def check_transform(transform: Transform, x: Tensor, context: Any = None, *, tol: float | None = None) -> None:
    """Raise `AssertionError` unless `transform` meets the contract of a `Transform` at the rows of `x`.

    Each direction is tested on its own: `logdet` of shape `(batch,)` is log |det| of the Jacobian by autograd, in the
    dtype of the input; a row's result does not depend on the other rows or on its position; no input is written to;
    float32 stays float32. Both round trips are tested: from x to z and back, and from points between the outputs to x
    and back. The test runs on a copy in evaluation mode, so the layer itself does not change.

    Args:
        transform: the layer, with parameters away from their initial values: a layer near the identity hides mistakes.
        x: `(batch, *event)`, at least two different rows of d entries each; float64 is the strictest.
        context: passed to the layer. A tensor in it (or in tuples, lists and dicts of it) whose first axis has the
            length of the batch belongs to the rows; any other is shared by all. Choose a batch size that leaves no
            doubt.
        tol: the relative error that counts as rounding; 1000 spacings of the dtype if None.

    Cost:
        2 d backward passes and two dense determinants of order d per row: choose small events.

    Example:
        >>> class Scale(T.Transform):
        ...     def _forward(self, x, context):
        ...         return 2 * x, x.new_full((x.shape[0],), x[0].numel() * torch.tensor(2.0).log())
        ...
        ...     def _inverse(self, z, context):
        ...         return z / 2, self._forward(z, context)[1]
        >>> check_transform(Scale(), torch.randn(3, 2))
        Traceback (most recent call last):
        AssertionError: Scale.inverse: Expected logdet = log |det| of the Jacobian; got 1.386..., where it is -1.386....
    """
    expect_tensor(x, "the input")
    expect(x.ndim >= 2 and x.shape[0] >= 2, "at least two rows (batch, *event)", f"shape {tuple(x.shape)}")
    check_tol(tol)
    layer, x = copy.deepcopy(transform).eval(), x.detach().clone()
    name = layer_name(transform)
    allowed = _ROUNDINGS * torch.finfo(x.dtype).eps if tol is None else tol
    with torch.no_grad():
        z = layer(x, context)[0]
    y = (z + z.roll(1, 0)) / 2
    there = _Direction(f"{name}.forward", layer, x, context, allowed)
    back = _Direction(f"{name}.inverse", layer.inverse, y, context, allowed)
    for direction in (there, back):
        _check_output(direction)
        _check_input_untouched(direction)
        _check_rows(direction)
        _check_logdet(direction)
    _check_round_trip(there, back)
    _check_round_trip(back, there)
    _check_float32(layer, x, y, context)


@dataclass(frozen=True)
class _Direction:
    """One direction of a layer, and the points at which to test it."""

    name: str
    run: Callable[[Tensor, Any], tuple[Tensor, Tensor]]
    at: Tensor
    context: Any
    tol: float


def _check_output(d: _Direction) -> None:
    """As many entries per row as the input, and one logdet per row; in the dtype of the input, and finite."""
    with torch.no_grad():
        out, logdet = d.run(d.at, d.context)
    batch = d.at.shape[0]
    fits = out.ndim >= 2 and out.shape[0] == batch and out.numel() == d.at.numel()
    _expect(fits, d.name, f"{batch} rows of {d.at[0].numel()} entries", f"shape {tuple(out.shape)}")
    _expect(logdet.shape == (batch,), d.name, f"logdet of shape ({batch},)", tuple(logdet.shape))
    for what, value in (("an output", out), ("logdet", logdet)):
        _expect(value.dtype == d.at.dtype, d.name, f"{what} of dtype {d.at.dtype}", value.dtype)
        _expect(bool(torch.isfinite(value).all()), d.name, f"{what} that is finite", "NaN or infinity")


def _check_input_untouched(d: _Direction) -> None:
    received = [d.at, *_tensors(d.context)]
    before = [tensor.clone() for tensor in received]
    with torch.no_grad():
        d.run(d.at, d.context)
    same = all(torch.equal(_dense(old), _dense(new)) for old, new in zip(before, received, strict=True))
    _expect(same, d.name, "what it receives to be left as it is", "something else written to it")


def _check_rows(d: _Direction) -> None:
    """Any selection of rows, in any order, gives the same rows as the whole batch."""
    batch = d.at.shape[0]
    with torch.no_grad():
        out, logdet = d.run(d.at, d.context)
        for rows in (list(range(batch))[::-1], [batch - 1], list(range(1, batch))):
            part, part_logdet = d.run(d.at[rows], _rows_of(d.context, rows, batch))
            scale = 1 + float(_norm(out))
            for got, expected in ((part, out[rows]), (part_logdet, logdet[rows])):
                error = float(_norm(got - expected)) / scale
                _expect(error <= d.tol, d.name, "rows of a batch that do not see each other", _apart(error, d.tol))


def _check_logdet(d: _Direction) -> None:
    point = d.at.detach().clone().requires_grad_()
    with torch.enable_grad():
        out, logdet = d.run(point, d.context)
    expected = torch.linalg.slogdet(_jacobian(out, point).double())[1]
    for got, true in zip(logdet.detach().double().tolist(), expected.tolist(), strict=True):
        allowed = d.tol * (d.at[0].numel() + abs(got))
        _expect(
            abs(got - true) <= allowed,
            d.name,
            "logdet = log |det| of the Jacobian",
            f"{got:.9g}, where it is {true:.9g}",
        )


def _check_round_trip(there: _Direction, back: _Direction) -> None:
    with torch.no_grad():
        z, logdet = there.run(there.at, there.context)
        x, logdet_back = back.run(z, back.context)
    error = float(_norm(x - there.at) / (1 + _norm(there.at) + _norm(z)))
    fact = f"{back.name.rpartition('.')[2]} to undo it"
    _expect(error <= there.tol, there.name, fact, _apart(error, there.tol))
    scale = there.at[0].numel() + float(logdet.abs().amax())
    error = float((logdet + logdet_back).abs().amax()) / scale
    _expect(error <= there.tol, there.name, f"{fact}, and the log-determinants to cancel", _apart(error, there.tol))


def _check_float32(layer: Transform, x: Tensor, y: Tensor, context: Any) -> None:
    single, context = copy.deepcopy(layer).float(), _mapped(context, _to_float32)
    name = layer_name(layer)
    for run, at, where in ((single, x, "forward"), (single.inverse, y, "inverse")):
        with torch.no_grad():
            out, logdet = run(at.float(), context)
        kept = out.dtype == logdet.dtype == torch.float32
        _expect(kept, f"{name}.{where}", "float32 to stay float32", f"{out.dtype} and logdet {logdet.dtype}")


def _jacobian(out: Tensor, point: Tensor) -> Tensor:
    """`(batch, d, d)`: row k is the gradient of output k, for all rows of the batch at once."""
    columns = out.flatten(1).unbind(1)
    if not out.requires_grad:
        return point.new_zeros(point.shape[0], len(columns), len(columns))
    grads = [torch.autograd.grad(c.sum(), point, retain_graph=True, materialize_grads=True)[0] for c in columns]
    return torch.stack([grad.flatten(1) for grad in grads], dim=1)


def _rows_of(context: Any, rows: list[int], batch: int) -> Any:
    return _mapped(context, lambda t: t[rows] if t.ndim > 0 and t.shape[0] == batch else t)


def _mapped(context: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The context with `change` applied to each tensor in it."""
    if isinstance(context, Tensor):
        return change(context)
    if isinstance(context, dict):
        return {key: _mapped(value, change) for key, value in context.items()}
    if isinstance(context, tuple | list):
        return type(context)(_mapped(value, change) for value in context)
    return context


def _tensors(context: Any) -> list[Tensor]:
    if isinstance(context, Tensor):
        return [context]
    parts = context.values() if isinstance(context, dict) else context if isinstance(context, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.detach().double())


def _apart(error: float, allowed: float) -> str:
    return f"a relative difference of {error:.3g}, where {allowed:.3g} is rounding"


def _expect(condition: bool, name: str, fact: str, got: object) -> None:
    if not condition:
        raise AssertionError(f"{name}: Expected {fact}; got {got}.")
