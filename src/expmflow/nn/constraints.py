"""Constraints as parametrizations: norms below a coefficient, and skew maps."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from expmflow._precision import without_autocast
from expmflow._transformed import batched, transformed
from expmflow._validation import expect
from expmflow.numerics import power_iteration
from expmflow.operators import ConvOperator, LinearOperator

WARM_UP = 15
NEGLIGIBLE = 1e-15  # negligible beside the square of any relevant norm
ROUNDS = 8  # of power iteration per training step: a convolution's norms are close together, and one round lags behind


class SpectralConstraint(nn.Module):
    """weight · min(1, coeff / σ), with σ the weight's norm over all frequencies, whatever the image size.

    On an unbounded image a convolution is one matrix per frequency. Its norm is the largest of their singular values,
    and no image, padded with zeros or wrapped, exceeds it. Power iteration tracks σ on a grid of frequencies, with one
    vector per frequency and a few rounds per training step. Between grid points the norm may exceed the samples by the
    factor 1/cos(πm/N) per axis (m the degree, N the samples). This factor is divided out, so the constraint holds
    everywhere once the iteration has settled.

    The module is a parametrization (`torch.nn.utils.parametrize`): a pure function of the weight and its buffers. In
    training, the layer calls `update`, which changes the buffers, before it uses the weight.

    Args:
        weight: `(C_out, C_in/groups, *k)`; without spatial axes, a matrix.
        coeff: the largest norm allowed.
        samples_per_degree: frequencies per axis and degree; 16 costs four percent of the norm in two dimensions.
        groups: channel blocks that do not mix.
    """

    turns: Tensor
    right: Tensor
    peak: Tensor
    seen: Tensor
    used: float = 1.0
    """σ of the last weight as a share of `coeff`, at most 1; 1 if it is not known."""
    _found: tuple[float, int, int] | None = None
    """σ from an update, with a mark of the weight, for the use of the weight right after the update."""

    def __init__(self, weight: Tensor, coeff: float, *, samples_per_degree: int = 16, groups: int = 1) -> None:
        super().__init__()
        expect(coeff > 0 and math.isfinite(coeff), "a positive coeff", coeff)
        self.coeff = coeff
        self.groups = groups
        turns, self.slack = _plane_waves(weight.shape[2:], samples_per_degree)
        shape, generator = (len(turns), groups, weight.shape[1], 2), torch.Generator().manual_seed(0)
        vectors = torch.randn(shape, generator=generator, device="cpu")  # whatever torch's default device
        vectors = vectors / torch.linalg.vector_norm(vectors, dim=(-2, -1), keepdim=True)
        self.register_buffer("turns", turns.to(weight), persistent=False)
        self.register_buffer("right", vectors.to(weight))
        self.register_buffer("peak", torch.zeros((), dtype=torch.int64, device=weight.device))
        self.register_buffer("seen", torch.zeros(1, dtype=weight.dtype, device=weight.device))
        self.update(weight.detach(), rounds=WARM_UP)
        self._found = None

    @torch.no_grad()
    def update(self, weight: Tensor, rounds: int = 1) -> None:
        """Rounds of v ← K̂ᴴ K̂ v at every frequency; the frequency with the largest ‖K̂ᴴ K̂ v‖ / ‖v‖ is the peak."""
        matrices, turns, v = _through_taps(weight, self.groups), self.turns, self.right.permute(1, 0, 3, 2)
        for _ in range(rounds):
            back = _there_and_back(matrices, turns, v).add_(v, alpha=NEGLIGIBLE)  # keep v if the weight is zero
            length = torch.linalg.vector_norm(back, dim=(-2, -1), keepdim=True)
            v = back.div_(length)
        self.peak.copy_(length.flatten(1).mT.argmax())
        self.right.copy_(v.permute(1, 0, 3, 2))
        self.seen.copy_(_mark(weight))
        if _readable(weight):
            frequency, group = divmod(int(self.peak), self.groups)
            sent = (v[group, frequency] @ matrices[group]).view(turns.shape[2], -1)
            norm = self.slack * float(torch.linalg.vector_norm(turns[frequency] @ sent))
            self._found = norm, *_identity(weight)

    def norm(self, weight: Tensor) -> Tensor:
        """The estimate of σ, with a gradient in the weight."""
        peak = frequency = self.peak.reshape(1)
        matrix = _through_taps(weight, self.groups)
        if self.groups > 1:
            frequency, matrix = peak // self.groups, matrix.index_select(0, peak % self.groups)
        v = self.right.flatten(0, 1).index_select(0, peak).mT.unsqueeze(0)
        return torch.linalg.vector_norm(_there(matrix, self.turns.index_select(0, frequency), v)) * self.slack

    @torch.no_grad()
    def settle(self, weight: Tensor) -> None:
        """As `update`, but with eigenvalues at every frequency: nothing lags, so the constraint holds for the current
        weight.

        Costs an eigenvalue problem of the smaller of the two channel counts per frequency. Meant for convolutions with
        few channels on one side, and for matrices.
        """
        exact = weight.to(torch.promote_types(weight.dtype, torch.float32))  # halves have no eigenvalues in torch
        taps, waves = self._taps(exact), self._waves(exact)
        few_inputs = taps.shape[1] <= taps.shape[3]
        grams = _grams(taps, waves.conj()) if few_inputs else _grams(taps.transpose(1, 3), waves)
        if len(grams) > 1:
            self.peak.copy_(torch.linalg.eigvalsh(grams)[..., -1].argmax())
        vector = torch.linalg.eigh(grams[self.peak]).eigenvectors[:, -1]
        if not few_inputs:  # K̂ᴴ maps it to the inputs
            wave = waves[self.peak // self.groups].conj()
            vector = torch.einsum("ito,t,o->i", taps[self.peak % self.groups].to(wave), wave, vector)
        vector = vector / torch.linalg.vector_norm(vector).clamp_min(NEGLIGIBLE)
        self.right.flatten(0, 1)[self.peak] = _real_parts(vector).to(self.right)
        self.seen.copy_(_mark(weight))
        self._found = None

    @torch.no_grad()
    def norm_bound(self, weight: Tensor) -> float:
        """A certified bound on the norm of `weight`: its largest singular value on the grid, times the slack."""
        return self.slack * float(torch.linalg.matrix_norm(self._symbols(weight.double()), 2).amax())

    def _symbols(self, weight: Tensor) -> Tensor:
        """The matrices K̂ at each frequency, `(frequencies, groups, out, in)`."""
        taps, waves = self._taps(weight), self._waves(weight)
        return torch.einsum("gito,ft->fgoi", taps.to(waves), waves)

    def _waves(self, like: Tensor) -> Tensor:
        """`(frequencies, taps)`; real if there is only one frequency."""
        cos, sin = self.turns[:, :, : self.turns.shape[2] // 2].to(like).unbind(1)
        return cos if len(self.turns) == 1 else torch.complex(cos, sin)

    def _taps(self, weight: Tensor) -> Tensor:
        """`(groups, in, taps, out)`."""
        return _through_taps(weight, self.groups).unflatten(2, (-1, weight.shape[0] // self.groups))

    def forward(self, weight: Tensor) -> Tensor:
        with without_autocast(weight.device.type):  # networks may run in half precision, their constraints must not
            if not torch.compiler.is_compiling():
                self.used = self._share(weight)
                if self.used < 1:
                    return weight
            return weight * (self.coeff / self.norm(weight).clamp_min(self.coeff))

    @torch.no_grad()
    def _share(self, weight: Tensor) -> float:
        """σ / coeff, at most 1; 1 if reading it would synchronise a device, or if the weight stands for many."""
        found, self._found = self._found, None
        if not _readable(weight):
            return 1.0
        if found is not None and found[1:] == _identity(weight):
            return min(1.0, found[0] / self.coeff)
        return min(1.0, float(self.norm(weight)) / self.coeff)


class PowerConstraint(nn.Module):
    """The paper's constraint: σ = ‖A v‖ with v from power iteration on the operator, at the last training batch's size.

    Args:
        template: the operator, whose kernel is replaced by the weight.
        coeff: the largest norm allowed.
    """

    vector: Tensor
    seen: Tensor

    def __init__(self, template: LinearOperator, coeff: float) -> None:
        super().__init__()
        self.coeff = coeff
        self._template = template
        self.register_buffer("vector", torch.empty(0))
        self.register_buffer("seen", torch.zeros(1))

    @torch.no_grad()
    def update(self, weight: Tensor, event_shape: tuple[int, ...]) -> None:
        """A few rounds; a hundred for a new image size."""
        known = tuple(self.vector.shape[1:]) == event_shape
        op = self._template.rebuild([weight])
        start = self.vector.to(weight) if known else None
        rounds = ROUNDS if known else 100
        _, vector = power_iteration(op, event_shape, iterations=rounds, start=start, return_vector=True)
        self.vector = _lasting(vector.contiguous())  # whatever the layout of the convolution: safetensors has no other
        self.seen.copy_(_mark(weight))

    def forward(self, weight: Tensor) -> Tensor:
        if self.vector.numel() == 0:  # no training batch yet: the initial weight is small
            return weight
        sigma = torch.linalg.vector_norm(self._template.rebuild([weight]).apply(self.vector.to(weight)))
        return weight * (self.coeff / sigma.clamp_min(self.coeff))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "vector" in state_dict:  # its shape follows the images of the training
            self.vector = torch.empty_like(state_dict[prefix + "vector"], device=self.vector.device)
        super()._load_from_state_dict(state_dict, prefix, *args)


class SkewMatrix(nn.Module):
    """W − Wᵀ."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.T


class SkewKernel(nn.Module):
    """The kernel of the convolution with w minus the transposed convolution."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, weight: Tensor) -> Tensor:
        return weight - ConvOperator(weight, groups=self.groups, validate=False).adjoint_kernel()


def constrain(layer: nn.Module, name: str, constraint: SpectralConstraint | PowerConstraint) -> None:
    """Register the constraint as the last parametrization of `layer.name`."""
    parametrize.register_parametrization(layer, name, constraint)


class _Tracking(threading.local):
    def __init__(self) -> None:
        self.suspended = False


_tracking = _Tracking()


@contextmanager
def constant_constraints() -> Iterator[None]:
    """A context in which constraints change only with the weights, so that repeated evaluations see one function."""
    before, _tracking.suspended = _tracking.suspended, True
    try:
        yield
    finally:
        _tracking.suspended = before


@torch.no_grad()
def constraint_has_seen(layer: nn.Module, name: str) -> bool:
    """Whether the constraint of `layer.name` is up to date with the weight."""
    *before, constraint = layer.parametrizations[name]  # type: ignore[index]
    weight = layer.parametrizations[name].original  # type: ignore[index, union-attr]
    for step in before:
        weight = step(weight)
    return bool(constraint.seen == _mark(weight).to(constraint.seen.dtype))


def update_constraint(layer: nn.Module, name: str, event_shape: tuple[int, ...], *, settle: bool = False) -> None:
    """Update the constraint of `layer.name` to the current weight; called at each pass in training.

    With `settle`, a `SpectralConstraint` uses eigenvalues instead of power iteration, and holds for exactly this
    weight.
    """
    *before, constraint = layer.parametrizations[name]  # type: ignore[index]
    weight = layer.parametrizations[name].original  # type: ignore[index, union-attr]
    expect(not batched(weight), "one weight to follow in training", "many inside torch.vmap: call eval() first")
    with torch.no_grad(), without_autocast(weight.device.type):
        for step in before:
            weight = step(weight)
        kept: dict[str, Tensor] = {}
        if _tracking.suspended:
            stays = constraint.seen == _mark(weight).to(constraint.seen.dtype)
            if torch.compiler.is_compiling():  # a compiled graph cannot branch, but it can select
                kept = {key: value.clone() for key, value in constraint.named_buffers() if key != "turns"}
            elif bool(stays):
                return
        if isinstance(constraint, PowerConstraint):
            constraint.update(weight, event_shape)
        elif settle:
            constraint.settle(weight)
        else:
            constraint.update(weight)
        for key, value in kept.items():
            buffer = getattr(constraint, key)
            if buffer.shape == value.shape:
                buffer.copy_(torch.where(stays.reshape(()), value, buffer))


def _grams(taps: Tensor, waves: Tensor) -> Tensor:
    """`(frequencies · groups, few, few)`: A Aᴴ for A = Σ_t taps_t waves_t, from taps `(groups, few, taps, many)`.

    The sum over the many channels comes first, once for all frequencies.
    """
    groups, few, count, _ = taps.shape
    pairs = taps.flatten(1, 2) @ taps.flatten(1, 2).mT
    half = torch.einsum("gitjs,fs->fgitj", pairs.view(groups, few, count, few, count).to(waves), waves.conj())
    return torch.einsum("fgitj,ft->fgij", half, waves).flatten(0, 1)


def _real_parts(vector: Tensor) -> Tensor:
    """Real and imaginary parts, `(…, 2)`."""
    imaginary = vector.imag if vector.is_complex() else torch.zeros_like(vector)
    return torch.stack([vector.real, imaginary], dim=-1)


def _readable(weight: Tensor) -> bool:
    """Whether a number can be read from it at no cost: not while compiling, from another device, or if it stands for
    many."""
    return not torch.compiler.is_compiling() and weight.device.type == "cpu" and not transformed(weight)


def _lasting(vector: Tensor) -> Tensor:
    """The vector, or, if it was made in inference mode, a copy that later passes can be differentiated with."""
    if torch.compiler.is_compiling() or not vector.is_inference():
        return vector
    with torch.inference_mode(False):
        return vector.clone()


def _identity(weight: Tensor) -> tuple[int, int]:
    """The memory of a weight, and how often it was written to, which torch does not count in inference mode."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _mark(weight: Tensor) -> Tensor:
    """A number that identifies the state of a weight; it is saved, so that a resumed run continues identically.

    `(1,)`, because compiled graphs lose writes to a float64 buffer without axes (PyTorch 2.13).
    """
    places = torch.linspace(0.5, 1, weight.numel(), dtype=weight.dtype, device=weight.device)
    return (weight.detach().flatten() @ places).reshape(1)


def _plane_waves(kernel_sizes: Sequence[int], samples_per_degree: int) -> tuple[Tensor, float]:
    """The matrices, in real parts, that map numbers at the taps to a frequency: `(frequencies, 2, 2 · taps)` on a grid.

    Also returns the factor that makes the maximum over the grid a bound over all frequencies.
    """
    taps, frequencies, slack = torch.zeros(1, 0, dtype=torch.float64), torch.zeros(1, 0, dtype=torch.float64), 1.0
    for axis, k in enumerate(kernel_sizes):
        degree = k // 2
        size = max(1, samples_per_degree * degree)
        kept = size // 2 + 1 if axis == 0 else size  # a real weight: conjugate pairs along one axis
        taps = _pairs(taps, torch.arange(k, dtype=torch.float64) - degree)
        frequencies = _pairs(frequencies, 2 * math.pi / size * torch.arange(kept, dtype=torch.float64))
        slack /= math.cos(math.pi * degree / size)
    angles = frequencies @ taps.T
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, -sin], dim=1), torch.cat([sin, cos], dim=1)], dim=1), slack


def _pairs(rows: Tensor, column: Tensor) -> Tensor:
    """Every row followed by every entry of the column; the last varies fastest."""
    return torch.cat([rows.repeat_interleave(len(column), 0), column.repeat(len(rows)).unsqueeze(1)], dim=1)


def _through_taps(weight: Tensor, groups: int) -> Tensor:
    """`(groups, in, taps · out)`: the weights of each input channel through each tap."""
    taps = weight.shape[2:].numel()
    return weight.reshape(groups, -1, weight.shape[1], taps).permute(0, 2, 3, 1).flatten(2)


def _there(matrices: Tensor, turns: Tensor, v: Tensor) -> Tensor:
    """K̂ v for complex vectors `(groups, frequencies, 2, in)`; K̂ is never formed."""
    groups, frequencies, _, channels = v.shape
    sent = torch.bmm(v.reshape(groups, 2 * frequencies, channels), matrices)
    return torch.bmm(_repeated(turns, groups), sent.view(groups * frequencies, turns.shape[2], -1))


def _there_and_back(matrices: Tensor, turns: Tensor, v: Tensor) -> Tensor:
    """K̂ᴴ K̂ v."""
    spread = torch.bmm(_repeated(turns, len(v)).mT, _there(matrices, turns, v))
    return torch.bmm(spread.view(len(v), 2 * len(turns), -1), matrices.mT).view(v.shape)


def _repeated(turns: Tensor, groups: int) -> Tensor:
    return turns if groups == 1 else turns.repeat(groups, 1, 1)
