"""Freed memory that a process keeps, and that it is the same memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = """
import resource, sys, torch
from expmflow.training.memory import keep_freed_memory

def steps():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        held = [torch.ones(2**20) for _ in range(4)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

steps()
handed_back = steps()
keep_freed_memory()
steps()
print(handed_back, steps())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_kept_pages_are_not_fetched_again():
    """Ten times sixteen megabytes: 40,000 pages, or fewer of larger ones."""
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    handed_back, kept = map(int, done.stdout.split())
    assert kept <= min(100, handed_back)
