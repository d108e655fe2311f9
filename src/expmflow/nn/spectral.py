"""The norm of a convolution over all frequencies, as a constraint."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from expmflow._precision import without_autocast
from expmflow._transformed import transformed
from expmflow._validation import expect
from expmflow.nn.fingerprint import fingerprint

WARM_UP = 15  # rounds of power iteration on the initial weight
NEGLIGIBLE = 1e-15  # negligible beside the square of any relevant norm


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

    turns: Tensor  # the plane waves at each frequency, in real parts: see `_plane_waves`
    right: Tensor  # v, an estimate of the right singular vector, at each frequency
    peak: Tensor  # the frequency and group of the largest norm
    seen: Tensor  # the fingerprint of the weight that the estimates belong to
    used: float = 1.0
    """σ of the last weight as a share of `coeff`, at most 1; 1 if it is not known."""
    _norm_of_update: tuple[float, int, int] | None = None
    """σ from an update, with address and version of the weight, for the use of the weight right after the update."""

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
        self._norm_of_update = None

    @torch.no_grad()
    def update(self, weight: Tensor, rounds: int = 1) -> None:
        """Rounds of v ← K̂ᴴ K̂ v at every frequency; the frequency with the largest ‖K̂ᴴ K̂ v‖ / ‖v‖ is the peak."""
        matrices, turns, v = _through_taps(weight, self.groups), self.turns, self.right.permute(1, 0, 3, 2)
        for _ in range(rounds):
            back = _apply_gram(matrices, turns, v).add_(v, alpha=NEGLIGIBLE)  # keep v if the weight is zero
            length = torch.linalg.vector_norm(back, dim=(-2, -1), keepdim=True)
            v = back.div_(length)
        self.peak.copy_(length.flatten(1).mT.argmax())
        self.right.copy_(v.permute(1, 0, 3, 2))
        self.seen.copy_(fingerprint(weight))
        if _readable(weight):
            frequency, group = divmod(int(self.peak), self.groups)
            at_taps = (v[group, frequency] @ matrices[group]).view(turns.shape[2], -1)
            norm = self.slack * float(torch.linalg.vector_norm(turns[frequency] @ at_taps))
            self._norm_of_update = norm, *_identity(weight)

    def norm(self, weight: Tensor) -> Tensor:
        """The estimate of σ, with a gradient in the weight."""
        peak = frequency = self.peak.reshape(1)
        matrix = _through_taps(weight, self.groups)
        if self.groups > 1:
            frequency, matrix = peak // self.groups, matrix.index_select(0, peak % self.groups)
        v = self.right.flatten(0, 1).index_select(0, peak).mT.unsqueeze(0)
        return torch.linalg.vector_norm(_apply_symbols(matrix, self.turns.index_select(0, frequency), v)) * self.slack

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
        self.seen.copy_(fingerprint(weight))
        self._norm_of_update = None

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
        known, self._norm_of_update = self._norm_of_update, None
        if not _readable(weight):
            return 1.0
        if known is not None and known[1:] == _identity(weight):
            return min(1.0, known[0] / self.coeff)
        return min(1.0, float(self.norm(weight)) / self.coeff)


def _readable(weight: Tensor) -> bool:
    """Whether a number can be read from it at no cost: not while compiling, from another device, or if it stands for
    many."""
    return not torch.compiler.is_compiling() and weight.device.type == "cpu" and not transformed(weight)


def _identity(weight: Tensor) -> tuple[int, int]:
    """The address of a weight, and how often it was written to, which torch does not count in inference mode."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


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


def _plane_waves(kernel_sizes: Sequence[int], samples_per_degree: int) -> tuple[Tensor, float]:
    """The matrices, in real parts, that map numbers at the taps to a frequency: `(frequencies, 2, 2 · taps)` on a grid.

    Also returns the factor that makes the maximum over the grid a bound over all frequencies.
    """
    taps, frequencies, slack = torch.zeros(1, 0, dtype=torch.float64), torch.zeros(1, 0, dtype=torch.float64), 1.0
    for axis, k in enumerate(kernel_sizes):
        degree = k // 2
        size = max(1, samples_per_degree * degree)
        count = size // 2 + 1 if axis == 0 else size  # a real weight: conjugate pairs along one axis
        taps = _pairs(taps, torch.arange(k, dtype=torch.float64) - degree)
        frequencies = _pairs(frequencies, 2 * math.pi / size * torch.arange(count, dtype=torch.float64))
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


def _apply_symbols(matrices: Tensor, turns: Tensor, v: Tensor) -> Tensor:
    """K̂ v for complex vectors `(groups, frequencies, 2, in)`; K̂ is never formed."""
    groups, frequencies, _, channels = v.shape
    at_taps = torch.bmm(v.reshape(groups, 2 * frequencies, channels), matrices)
    return torch.bmm(_repeated(turns, groups), at_taps.view(groups * frequencies, turns.shape[2], -1))


def _apply_gram(matrices: Tensor, turns: Tensor, v: Tensor) -> Tensor:
    """K̂ᴴ K̂ v."""
    at_taps = torch.bmm(_repeated(turns, len(v)).mT, _apply_symbols(matrices, turns, v))
    return torch.bmm(at_taps.view(len(v), 2 * len(turns), -1), matrices.mT).view(v.shape)


def _repeated(turns: Tensor, groups: int) -> Tensor:
    return turns if groups == 1 else turns.repeat(groups, 1, 1)
