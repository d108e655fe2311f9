"""Several times at once, in the forms that users pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expmflow._validation import expect, expect_type


def vector_of_times(times: Sequence[float | Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list of times as a tensor, through which gradients flow to the times that are tensors."""
    if not any(isinstance(time, Tensor) for time in times):
        try:
            return torch.tensor(times, dtype=dtype, device=device)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"Expected numbers in the list of times t; got {times!r}.") from None
    each = []
    for time in times:
        if isinstance(time, Tensor):
            expect_type(not time.is_complex(), "real times t", time.dtype)
            expect(time.ndim == 0, "numbers in the list of times t", f"a tensor of shape {tuple(time.shape)}")
            each.append(time.to(dtype=dtype, device=device))
        else:
            each.append(vector_of_times([time], dtype, device).reshape(()))
    return torch.stack(each)
