"""The contexts that every draft runs in: the drafts' tensor-parallel group, and their mixture-of-experts backend.

Layers ask ``current_tp_group`` and ``current_moe_backend`` when they run; a context switches the answer for the drafts and
restores it on the way out, whatever happens inside.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """The ranks that share one model's matrices. ``process_group`` is None exactly when there is one rank."""

    size: int = 1
    rank: int = 0
    process_group: dist.ProcessGroup | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the group, in place; ``x`` itself where the group has one rank."""
        if self.size > 1:
            dist.all_reduce(x, group=self.process_group)
        return x


SINGLE = TensorParallelGroup()
_tp_group: ContextVar[TensorParallelGroup] = ContextVar("tp_group", default=SINGLE)
_moe_backend: ContextVar[str] = ContextVar("moe_backend", default="loop")
_speculative_moe_backend: ContextVar[str | None] = ContextVar("speculative_moe_backend", default=None)


def current_tp_group() -> TensorParallelGroup:
    """The group that layers reduce over just now."""
    return _tp_group.get()


def current_moe_backend() -> str:
    """The backend that expert layers use just now."""
    return _moe_backend.get()


@contextmanager
def draft_tp_context(group: TensorParallelGroup) -> Iterator[None]:
    """Run the drafts inside ``group`` (MTP runner 0's), which may differ from the target's."""
    token = _tp_group.set(group)
    try:
        yield
    finally:
        _tp_group.reset(token)


@contextmanager
def moe_backends(target: str, speculative: str | None) -> Iterator[None]:
    """Choose the expert layers' backend for the target, and another for the drafts (None: the target's)."""
    tokens = _moe_backend.set(target), _speculative_moe_backend.set(speculative)
    try:
        yield
    finally:
        _moe_backend.reset(tokens[0])
        _speculative_moe_backend.reset(tokens[1])


@contextmanager
def speculative_moe_backend_context() -> Iterator[None]:
    """Run the drafts with the speculative MoE backend; without one of their own they keep the target's."""
    chosen = _speculative_moe_backend.get()
    token = _moe_backend.set(_moe_backend.get() if chosen is None else chosen)
    try:
        yield
    finally:
        _moe_backend.reset(token)
