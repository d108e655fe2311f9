"""One process or many: `torchrun` starts them, gloo or NCCL connects them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from expmflow._validation import expect


class ExchangeError(RuntimeError):
    """Another process did not answer in time, or has ended; the message says who waited, and for how long."""


@dataclass(frozen=True)
class Processes:
    """This process, its rank, and the number of all processes."""

    rank: int = 0
    count: int = 1

    @property
    def writes(self) -> bool:
        """Whether this is the one process that writes files."""
        return self.rank == 0

    def slice(self, rows: Tensor) -> Tensor:
        """This process's part of a global batch."""
        share = len(rows) // self.count
        expect(share * self.count == len(rows), f"a batch that {self.count} processes can share", len(rows))
        return rows[self.rank * share : (self.rank + 1) * share]

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.count > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            dist.barrier()


def own_device(name: str) -> torch.device:
    """The device of this process; with several GPUs, each process that `torchrun` started has its own."""
    if name != "cuda" or "LOCAL_RANK" not in os.environ:
        return torch.device(name)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


@contextmanager
def processes(device: torch.device, minutes: float) -> Iterator[Processes]:
    """Join the processes that `torchrun` started; a single process joins nobody.

    The start, and every exchange inside, wait for at most `minutes`.

    Raises:
        ExchangeError: if other processes did not answer in time, or have ended.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    try:
        backend, limit = "nccl" if device.type == "cuda" else "gloo", timedelta(minutes=minutes)
        store, rank, count = _meeting_place(limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
        yield Processes(rank, count)
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not isinstance(error, dist.DistError) and "gloo" not in reason:
            raise
        who = f"process {os.environ.get('RANK', '?')} of {os.environ['WORLD_SIZE']}"
        raise ExchangeError(
            f"Expected the other processes to answer within {minutes:g} minutes (train.timeout); "
            f"got no answer in {who}: {reason.rpartition('] ')[2].rstrip('.')}."
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


_meetings = itertools.count()
_places: list[tuple[Any, int, int]] = []


def _meeting_place(limit: timedelta) -> tuple[Any, int, int]:
    """The store where the processes meet, the rank of this one, and their number.

    A process may train several times. Each time uses its own names in the store, because the names of the time before
    may still hold addresses of processes that have ended.
    """
    from torch.distributed.rendezvous import rendezvous  # missing in some builds of torch

    if not _places:
        _places.append(next(rendezvous("env://", timeout=limit)))
    store, rank, count = _places[0]
    store.set_timeout(limit)
    own = dist.PrefixStore(f"training {next(_meetings)}", store)  # type: ignore[attr-defined]
    return own, rank, count
