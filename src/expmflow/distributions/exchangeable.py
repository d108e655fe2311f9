"""Densities of sets of vectors."""

from __future__ import annotations

import math
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from expmflow._validation import expect
from expmflow.distributions.flow import Flow
from expmflow.distributions.gaussian import Base


@final
class Exchangeable(Base):
    """A density of N vectors in any order, from a density of vectors sorted by their first features.

    All N! orders are equally likely, so p(x) = q(sorted x) / N!. Sorting costs no degrees of freedom: the smallest
    first feature and the logarithms (softplus⁻¹) of the gaps between neighbours are unconstrained numbers. `flow` is a
    density of these and the other features. The likelihood is exact, and invariant under permutations of the vectors.

    Args:
        nodes, features: N and the length of each vector.
        flow: a density of `(batch, N · features)`, one vector after the other.

    Example:
        >>> sets = Exchangeable(3, 2, ef.Flow(T.Chain([]), ef.distributions.StandardNormal((6,))))
        >>> x = sets.rsample(1)
        >>> torch.equal(sets.log_prob(x), sets.log_prob(x.flip(1)))
        True
    """

    sees_context: ClassVar[bool] = True

    def __init__(self, nodes: int, features: int, flow: Flow) -> None:
        super().__init__((nodes, features))
        expect(
            flow.base.event_shape == (nodes * features,),
            f"a flow of vectors of length {nodes * features}",
            f"events {flow.base.event_shape}",
        )
        self.flow = flow

    def description(self) -> str:
        return f"{super().description()}, in the order of their first features:\n{self.flow.description()}"

    def log_prob(self, z: Tensor, context: Any = None) -> Tensor:
        _refuse(context)
        shape = tuple(z.shape[1:])
        expect(shape == self.event_shape, f"sets of shape (batch, *{self.event_shape})", f"events {shape}")
        free, logdet = _free(z.gather(1, z[..., :1].argsort(1).expand_as(z)))
        return self.flow.log_prob(free.flatten(1)) + logdet - math.lgamma(shape[0] + 1)

    def noise_shape(self, context: Any) -> tuple[int, ...]:
        """One more number for each vector, by which the vectors are put in random order."""
        _refuse(context)
        return self.event_shape[0], self.event_shape[1] + 1

    def transform_noise(self, noise: Tensor, temperature: float) -> Tensor:
        start = self.flow.base.transform_noise(noise[..., :-1].flatten(1), temperature)
        ordered = _ordered(self.flow.decode(start).unflatten(1, self.event_shape))
        return ordered.gather(1, noise[..., -1:].argsort(1).expand_as(ordered))


def _refuse(context: Any) -> None:
    expect(context is None, "no context for a density of sets", type(context).__name__)


def _free(ordered: Tensor) -> tuple[Tensor, Tensor]:
    """The unconstrained numbers of sorted vectors, `(batch, N, features)`, and the log-determinant."""
    first = ordered[..., 0]
    gaps = first.diff(dim=1).clamp_min(torch.finfo(first.dtype).eps)
    log_share = torch.log(-torch.expm1(-gaps))
    heads = torch.cat([first[:, :1], gaps + log_share], dim=1)
    return torch.cat([heads.unsqueeze(-1), ordered[..., 1:]], dim=-1), -log_share.sum(1)


def _ordered(free: Tensor) -> Tensor:
    """The inverse of `_free`."""
    heads = torch.cat([free[:, :1, 0], torch.nn.functional.softplus(free[:, 1:, 0])], dim=1).cumsum(1)
    return torch.cat([heads.unsqueeze(-1), free[..., 1:]], dim=-1)
