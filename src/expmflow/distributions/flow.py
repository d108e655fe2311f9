"""A flow: an invertible layer and a base density, which together give an exact likelihood."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Distribution

from expmflow._validation import expect, expect_count, expect_type
from expmflow.distributions.describe import count_parameters, description, empty_context
from expmflow.distributions.fitting import fitting_shape, takes_context
from expmflow.distributions.foreign import TorchBase
from expmflow.distributions.gaussian import Base
from expmflow.distributions.protocol import Density, Draw, Noise, lone_noise, repeat_context
from expmflow.transforms.base import Transform, layer_name, unread, watching


class NonFiniteError(RuntimeError):
    """A likelihood, a sample or a latent is NaN or infinite; `layer` names where that began."""

    def __init__(self, message: str, layer: str) -> None:
        super().__init__(message)
        self.layer = layer


@final
class Flow(Density):
    """p(x) = base(f(x)) · |det df/dx| for an invertible layer f.

    Calling the flow is `log_prob`, so it trains like any module. If a result is not finite, it raises `NonFiniteError`
    with the name of the first layer that produced it, in either direction. The search runs only in that case.

    Args:
        transform: data to noise.
        base: the density of the noise, of the shape that the layers give; a base of this package, or any
            `torch.distributions.Distribution` with an empty batch shape, which becomes a `TorchBase`.

    Example:
        >>> flow = ef.Flow(T.Chain([T.ActNorm(2), T.LinearExp(2)]), ef.distributions.StandardNormal((2,)))
        >>> flow.log_prob(torch.randn(5, 2)).shape, flow.sample(3).shape
        (torch.Size([5]), torch.Size([3, 2]))
    """

    def __init__(self, transform: Transform, base: Base | Distribution) -> None:
        super().__init__()
        base = TorchBase(base) if isinstance(base, Distribution) else base
        expect_type(isinstance(base, Base), "a base density, ours or of torch.distributions", type(base).__name__)
        self._event_shape = fitting_shape(transform, base)
        self.transform = transform
        self.base = base
        self._takes_context = takes_context(self)

    @property
    def event_shape(self) -> tuple[int, ...]:
        return self._event_shape

    @property
    def sample_draws(self) -> tuple[Draw, ...]:
        return () if self.base.draws_itself else (Draw("normal", self.base.noise_shape(None)),)

    def forward(self, x: Tensor, context: Any = None, *, noise: Noise = None) -> Tensor:
        """`log_prob`, which takes no noise."""
        expect(noise is None or len(noise) == 0, "no noise for the likelihood of a flow", "some")
        return self.log_prob(x, context)

    def log_prob(self, x: Tensor, context: Any = None) -> Tensor:
        """log p(x | context), `(batch,)`."""
        z, logdet = self._run(x, context, inverse=False)
        result = self.base.log_prob(z, *self._for_base(context)) + logdet
        self._check((result,), x, context, inverse=False)
        return result

    @torch.no_grad()
    def sample(
        self,
        n: int,
        context: Any = None,
        *,
        temperature: float = 1.0,
        noise: Noise = None,
        per_row: int | None = None,
    ) -> Tensor:
        """`(n, *event)`; a context has one row per sample, or is shared by all (a graph).

        Args:
            n: the number of samples; with `per_row`, the number of rows of the context.
            context: the condition.
            temperature: multiplies the standard deviation of the noise.
            noise: the random numbers of `sample_draws`; with `per_row`, `n · per_row` rows of them.
            per_row: samples for each row of the context; the result is then `(n, per_row, *event)`.
        """
        return self.rsample(n, context, temperature=temperature, noise=noise, per_row=per_row)

    def rsample(
        self,
        n: int,
        context: Any = None,
        *,
        temperature: float = 1.0,
        noise: Noise = None,
        per_row: int | None = None,
    ) -> Tensor:
        """As `sample`, but differentiable."""
        if per_row is not None:
            drawn = self.rsample(*self._repeated(n, context, per_row), temperature=temperature, noise=noise)
            return drawn.unflatten(0, (n, per_row))
        z = self.base.rsample(n, *self._for_base(context), temperature=temperature, noise=lone_noise(noise))
        return self.decode(z, context)

    def sample_and_log_prob(
        self, n: int, context: Any = None, *, noise: Tensor | None = None, per_row: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Samples and their log-likelihoods in one pass; differentiable. Shapes start with `(n, per_row)` if given."""
        if per_row is not None:
            drawn = self.sample_and_log_prob(*self._repeated(n, context, per_row), noise=noise)
            x, log_prob = (part.unflatten(0, (n, per_row)) for part in drawn)
            return x, log_prob
        z = self.base.rsample(n, *self._for_base(context), noise=noise)
        x, logdet = self._run(z, context, inverse=True)
        result = self.base.log_prob(z, *self._for_base(context)) - logdet
        self._check((x, result), z, context, inverse=True)
        return x, result

    def encode(self, x: Tensor, context: Any = None) -> Tensor:
        """The noise of x, including factored-out latents."""
        self._for_base(context)
        z, _ = self._run(x, context, inverse=False)
        self._check((z,), x, context, inverse=False)
        return z

    def decode(self, z: Tensor, context: Any = None) -> Tensor:
        """The data of z."""
        self._for_base(context)
        x, _ = self._run(z, context, inverse=True)
        self._check((x,), z, context, inverse=True)
        return x

    @torch.no_grad()
    def round_trip_error(self, x: Tensor, context: Any = None) -> Tensor:
        """The largest |x − decode(encode(x))| of each row."""
        return (self.decode(self.encode(x, context), context) - x).abs().flatten(1).amax(1)

    def description(self) -> str:
        """The layers: shapes, parameters (without masked ones), closed-form directions."""
        like = self.base._like
        context = empty_context(self.transform)
        table = description(
            self.transform,
            torch.zeros(1, *self.event_shape, dtype=like.dtype, device=like.device),  # type: ignore[arg-type]
            None if context is None else context.to(like),  # type: ignore[arg-type]
        )
        return f"{table}\nbase: {self.base.description()}\nparameters in all: {count_parameters(self):,}"

    def _repeated(self, n: int, context: Any, per_row: int) -> tuple[int, Any]:
        """The total number of samples, and the context of each."""
        expect_count(n, "the number of rows", at_least=0)
        expect_count(per_row, "per_row")
        return n * per_row, repeat_context(context, n, per_row, axes=len(self.event_shape))

    def _for_base(self, context: Any) -> tuple[Any, ...]:
        """The base's arguments from the context; raises if there is a context that no layer takes."""
        if context is not None and not torch.compiler.is_compiling():
            if not self._takes_context:  # a layer may have been added since
                self._takes_context = takes_context(self)
            expect(self._takes_context, "no context, as no layer of the flow takes one", type(context).__name__)
        return (context,) if self.base.sees_context else ()

    def _run(self, x: Tensor, context: Any, *, inverse: bool) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return self.transform.inverse(x, context) if inverse else self.transform(x, context)
        try:
            with unread():
                return self.transform.inverse(x, context) if inverse else self.transform(x, context)
        except (ValueError, RuntimeError):  # a layer may raise on NaN
            where = self._first_not_finite(x, context, inverse)
            if where is None:
                raise
            raise NonFiniteError(f"Expected finite numbers; got NaN or infinity, first in {where}.", where) from None

    def _check(self, results: tuple[Tensor, ...], x: Tensor, context: Any, *, inverse: bool) -> None:
        if torch.compiler.is_compiling() or _finite(*results):
            return
        where = self._first_not_finite(x, context, inverse) or f"base ({type(self.base).__name__})"
        raise NonFiniteError(f"Expected a finite result; got NaN or infinity, first in {where}.", where)

    def _first_not_finite(self, x: Tensor, context: Any, inverse: bool) -> str | None:
        """The input, or the layer, where NaN or infinity began: runs the flow again and checks every layer."""
        if not _finite(x):
            return "the input"
        names = {module: name for name, module in self.named_modules()}
        culprits: list[Transform] = []

        def look(layer: Transform, received: Tensor, out: Tensor, logdet: Tensor) -> None:
            if _finite(received) and not _finite(out, logdet):
                culprits.append(layer)

        with torch.no_grad(), unread(), watching(look), suppress(ValueError, RuntimeError):
            self.transform.inverse(x, context) if inverse else self.transform(x, context)
        if not culprits:  # a layer that raised was not recorded: its weights may be the reason
            layers = [module for module in names if isinstance(module, Transform)]
            bad = [layer for layer in layers if not _finite(*layer.parameters())]
            culprits = [layer for layer in bad if not any(part in bad for part in list(layer.modules())[1:])]
        return f"{names.get(culprits[0], 'transform')} ({layer_name(culprits[0])})" if culprits else None


def _finite(*tensors: Tensor) -> bool:
    return bool(torch.stack([torch.isfinite(tensor.detach()).all() for tensor in tensors]).all()) if tensors else True
