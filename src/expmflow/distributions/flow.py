"""A flow: an invertible layer and a base density, together an exact likelihood."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from expmflow.distributions.gaussian import Base
from expmflow.transforms.base import Transform, layer_name, unread, watching


class NonFiniteError(RuntimeError):
    """A log-likelihood came out as NaN or infinity; `layer` names where it began."""

    def __init__(self, message: str, layer: str) -> None:
        super().__init__(message)
        self.layer = layer


@final
class Flow(nn.Module):
    """p(x) = base(f(x)) · |det df/dx| for an invertible layer f.

    Calling the flow is `log_prob`, so that it trains like any module. A result that is not finite raises
    `NonFiniteError` with the name of the first layer that produced it; the search costs nothing unless it is needed.

    Args:
        transform: data to noise.
        base: the density of the noise, with the event's shape.

    Example:
        >>> flow = ef.Flow(T.Chain([T.ActNorm(2), T.LinearExp(2)]), ef.distributions.StandardNormal((2,)))
        >>> flow.log_prob(torch.randn(5, 2)).shape, flow.sample(3).shape
        (torch.Size([5]), torch.Size([3, 2]))
    """

    def __init__(self, transform: Transform, base: Base) -> None:
        super().__init__()
        self.transform = transform
        self.base = base

    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        """`log_prob`."""
        return self.log_prob(x, context)

    def log_prob(self, x: Tensor, context: Any = None) -> Tensor:
        """log p(x | context), `(batch,)`."""
        with unread():
            z, logdet = self.transform(x, context)
        result = self.base.log_prob(z) + logdet
        if not torch.compiler.is_compiling() and not bool(torch.isfinite(result.detach()).all()):
            self._blame(x, context, inverse=False)
        return result

    @torch.no_grad()
    def sample(self, n: int, context: Any = None, *, temperature: float = 1.0, noise: Tensor | None = None) -> Tensor:
        """`(n, *event)`; a context has one row per sample, or is shared by all (a graph)."""
        return self.rsample(n, context, temperature=temperature, noise=noise)

    def rsample(self, n: int, context: Any = None, *, temperature: float = 1.0, noise: Tensor | None = None) -> Tensor:
        """As `sample`, differentiable."""
        return self.decode(self.base.rsample(n, temperature=temperature, noise=noise), context)

    def sample_and_log_prob(self, n: int, context: Any = None, *, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Samples and their log-likelihoods in one pass; differentiable."""
        z = self.base.rsample(n, noise=noise)
        with unread():
            x, logdet = self.transform.inverse(z, context)
        result = self.base.log_prob(z) - logdet
        if not torch.compiler.is_compiling() and not bool(torch.isfinite(result.detach()).all()):
            self._blame(z, context, inverse=True)
        return x, result

    def encode(self, x: Tensor, context: Any = None) -> Tensor:
        """The noise of x: all of it, factored-out latents included."""
        return self.transform(x, context)[0]

    def decode(self, z: Tensor, context: Any = None) -> Tensor:
        """The data of z."""
        return self.transform.inverse(z, context)[0]

    def _blame(self, x: Tensor, context: Any, *, inverse: bool) -> None:
        """Run once more, looking after each layer."""
        if not bool(torch.isfinite(x).all()):
            raise NonFiniteError("Expected a finite input to the flow; got NaN or infinity in it.", "input")
        names = {module: name for name, module in self.named_modules()}
        culprits: list[Transform] = []

        def look(layer: Transform, out: Tensor, logdet: Tensor) -> None:
            if not (bool(torch.isfinite(out).all()) and bool(torch.isfinite(logdet).all())):
                culprits.append(layer)

        with torch.no_grad(), unread(), watching(look):
            (self.transform.inverse if inverse else self.transform)(x, context)
        if culprits:
            first = culprits[0]
            name = f"{names.get(first, 'transform')} ({layer_name(first)})"
        else:
            name = f"base ({type(self.base).__name__})"
        raise NonFiniteError(f"Expected a finite log-likelihood; got NaN or infinity, first in layer {name}.", name)
