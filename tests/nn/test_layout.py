"""The order of images in memory changes neither their entries nor their gradients."""

from __future__ import annotations

import pytest
import torch

from expmflow import nn
from expmflow.nn.layout import channels_last


@pytest.mark.parametrize("channels", [1, 2])
def test_entries_stay_and_channels_are_next_to_each_other(channels):
    x = torch.randn(3, channels, 4, 5)
    y = channels_last(x)
    assert torch.equal(x, y)
    assert y.stride() == (20 * channels, 1, 5 * channels, channels)


def test_one_channel_is_not_copied():
    x = torch.randn(3, 1, 4, 5)
    assert channels_last(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("channels", [1, 2])
def test_a_dense_block_gives_the_same_in_either_order(channels):
    block = nn.DenseBlock(channels, 2, growth=3, depth=2).double()
    x = torch.randn(2, channels, 4, 6, dtype=torch.float64, requires_grad=True)
    plain, ordered = block(x), block(channels_last(x))
    torch.testing.assert_close(ordered, plain)
    gradients = [torch.autograd.grad(z.square().sum(), x)[0] for z in (plain, ordered)]
    torch.testing.assert_close(*gradients)
    assert ordered.is_contiguous(memory_format=torch.channels_last)
