"""Bounds where the torus has more frequencies than are sampled: still bounds, and still tight."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import expmflow as ef
from expmflow.operators.spectrum import SAMPLES_PER_DEGREE
from reference import conv_matrix, lambda_max, sigma_max

# the samples may miss the largest frequency by the factor 1/cos(π/32) per axis
SLACK = 1 / math.cos(math.pi / SAMPLES_PER_DEGREE)


@given(
    kernel_size=st.sampled_from([3, 5]),
    dilation=st.integers(1, 3),
    padding=st.sampled_from(["zeros", "reflect"]),
    channels=st.integers(1, 2),
    more=st.integers(0, 40),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=20)
def test_sampled_bounds_are_never_below(kernel_size, dilation, padding, channels, more, seed):
    size = SAMPLES_PER_DEGREE * (kernel_size // 2) + 1 + more
    generator = torch.Generator().manual_seed(seed)
    kernel = torch.randn(channels, channels, kernel_size, generator=generator, dtype=torch.float64)
    matrix = conv_matrix(kernel, (size,), padding, (dilation,), 1)
    op, event = ef.ConvOperator(kernel, padding, dilation=dilation), (channels, size)
    assert float(op.norm_bound(event)) >= sigma_max(matrix) * (1 - 1e-13)
    assert float(op.log_norm_bound(event)) >= lambda_max(matrix) - 1e-13 * sigma_max(matrix)


@given(peak=st.floats(0, math.pi), size=st.integers(400, 500))
@settings(max_examples=20)
def test_a_peak_between_the_samples_is_covered(peak, size):
    """A symbol with the eigenvalue 1 + cos(ω − ω₀) peaks at any ω₀ we like, sampled or not."""
    cosine, sine = math.cos(peak) / 2, math.sin(peak) / 2
    shift = torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64)  # rotates by ω₀ as it moves one point
    kernel = torch.stack([shift, torch.eye(2, dtype=torch.float64), shift.T], dim=-1)
    op, event = ef.ConvOperator(kernel), (2, size)
    assert 2 <= float(op.norm_bound(event)) <= 2 * SLACK * (1 + 1e-12)
    # symmetric, so μ = 2 as well; its bound pays twice, once for each end of the spectrum
    assert 2 <= float(op.log_norm_bound(event)) <= 2 * (SLACK + SLACK**2 - SLACK) * (1 + 1e-12)


def test_two_dimensions_against_the_dense_matrix():
    kernel = torch.randn(1, 1, 3, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    op, event = ef.ConvOperator(kernel), (1, 34, 34)
    assert all(n + 1 > SAMPLES_PER_DEGREE for n in event[1:])
    gram = conv_matrix(kernel, (34, 34), "zeros", (1, 1), 1)
    truth = float(torch.linalg.eigvalsh(gram.T @ gram)[-1].sqrt())
    assert truth <= float(op.norm_bound(event)) <= 1.02 * truth


@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_large_image_against_power_iteration(padding):
    """The estimate from below and the bound from above meet."""
    kernel = torch.randn(3, 3, 3, 3, generator=torch.Generator().manual_seed(4))
    op, event = ef.ConvOperator(kernel, padding), (3, 64, 64)
    estimate, bound = float(ef.power_iteration(op, event, iterations=100)), float(op.norm_bound(event))
    assert estimate <= bound * (1 + 1e-6)
    assert bound <= 1.05 * estimate


def test_the_bound_does_not_grow_with_the_image():
    kernel = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    op = ef.ConvOperator(kernel)
    assert float(op.norm_bound((2, 100, 100))) == float(op.norm_bound((2, 4000, 4000)))
