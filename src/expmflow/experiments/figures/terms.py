"""The convolution exponential of the paper's edge filter on a photograph, term by term."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow._validation import expect_count
from expmflow.experiments import feature_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = 120
CORNER, SIDE = (20, 130), 380  # the part of the photograph that is shown: a flower


def photograph(size: int = SIZE) -> Tensor:
    """A grey flower, `(1, 1, size, size)` with values in [0, 1], from a photograph that ships with scikit-learn."""
    expect_count(size, "size")
    try:
        from sklearn.datasets import load_sample_image
    except ImportError as error:
        raise ImportError("Expected scikit-learn for a photograph; got none. Install the extra `train`.") from error
    whole = torch.tensor(load_sample_image("flower.jpg")).float() / 255
    (top, left), weights = CORNER, torch.tensor([0.299, 0.587, 0.114])  # of red, green and blue in grey
    part = whole[top : top + SIDE, left : left + SIDE] @ weights
    return F.interpolate(part[None, None], size=(size, size), mode="area")


def terms_figure() -> Figure:
    """Forward above, inverse below."""
    return feature_maps.terms_figure(feature_maps.run(photograph()))
