"""The paper's ablation: the convolutional Sylvester flow without its autoregressive function."""

from __future__ import annotations

from typing import final

from expmflow.nn.triangular import TriangularConvInner
from expmflow.transforms.shapes import expect_images
from expmflow.transforms.sylvester import GeneralizedSylvester, conv_basis


@final
class TriangularConvSylvester(GeneralizedSylvester):
    """The convolutional Sylvester flow without f_AR: f(u) = R̃ tanh(R u + b), with triangular convolutions R and R̃.

    The basis W = exp(M) Q is that of `ConvSylvester`, and so is the inverse.

    Args:
        channels: C of the input `(batch, C, h, w)`.
        width: hidden units per channel of f: 1 in the paper; more to match the number of parameters of f_AR.
        kernel_size, coeff: of the convolution exponential; R and R̃ have the same kernel size.
        reflections: Householder reflections of Q; one per channel if None.
        lipschitz: the largest norm of R and of R̃; None for no constraint, as in the paper.
        context_channels: channels of a context `(batch, channels, h, w)` or `(batch, channels)`; 0 for none.
        use_basis: False omits the change of basis.
        tol, max_iterations: of the inverse.

    Example:
        >>> layer = T.TriangularConvSylvester(4, width=8)
        >>> z, logdet = layer(torch.randn(2, 4, 8, 8))
        >>> x, _ = layer.inverse(z)
    """

    def __init__(
        self,
        channels: int,
        width: int = 1,
        *,
        kernel_size: int = 3,
        coeff: float = 0.9,
        reflections: int | None = None,
        lipschitz: float | None = None,
        context_channels: int = 0,
        use_basis: bool = True,
        tol: float | None = None,
        max_iterations: int = 200,
    ) -> None:
        basis = conv_basis(channels, reflections, use_basis, kernel_size=kernel_size, coeff=coeff)
        inner = TriangularConvInner(
            channels, kernel_size=kernel_size, width=width, lipschitz=lipschitz, context_channels=context_channels
        )
        super().__init__(basis, inner, tol=tol, max_iterations=max_iterations)
        self.channels = channels

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_images(event_shape, self.channels)
