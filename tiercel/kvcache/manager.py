"""The one owner of KV slots: reserve before a forward, commit what is final, roll back the rest, release at the end.

Slots come in pages of ``page_size``; a request's positions ``0 .. reserved - 1`` map to slots through its own row of the
table. The target and every MTP layer use the same slot for the same position.

    position   0 ........ committed ........ reserved
               | final KV | written, maybe  |
               |          | wrong: overwritten or rolled back
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class OutOfPages(Exception):
    """The pool cannot give the pages asked for; nothing was changed."""


class KvCacheError(Exception):
    """The pool's books do not balance: a fault of ours."""


@dataclass(slots=True)
class _Owner:
    """A request's pages; ``slots`` has room for more than them, because pages come and go in every round."""

    pages: list[int] = field(default_factory=list)
    slots: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    committed: int = 0


class KvCacheManager:
    """Owns every request's slots, keyed by request id.

    Args:
        num_tokens: slots in the pool; rounded down to whole pages.
        page_size: slots per page.
    """

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_tokens // page_size
        self._free = list(reversed(range(self.num_pages)))  # last in, first out: memory that was used is used again
        self._owners: dict[str, _Owner] = {}

    @property
    def num_slots_total(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_slots_used(self) -> int:
        """Slots of all pages that are owned, full or not."""
        return (self.num_pages - len(self._free)) * self.page_size

    def can_reserve(self, request_id: str, length: int) -> bool:
        """Whether ``reserve`` with the same arguments would succeed."""
        return self._missing_pages(request_id, length) <= len(self._free)

    def reserve(self, request_id: str, length: int) -> None:
        """Make room for positions ``0 .. length - 1`` of a request.

        Raises:
            OutOfPages: too few free pages; nothing was changed.
        """
        missing = self._missing_pages(request_id, length)
        if missing > len(self._free):
            raise OutOfPages(f"{request_id} needs {missing} pages, {len(self._free)} are free")
        owner = self._owners.setdefault(request_id, _Owner())
        for _ in range(missing):
            self._add_page(owner, self._free.pop())

    def commit(self, request_id: str, length: int) -> None:
        """Declare positions ``0 .. length - 1`` final.

        Raises:
            KvCacheError: they were not reserved, or fewer than were committed before.
        """
        owner = self._owners[request_id]
        if not owner.committed <= length <= self._length(owner):
            raise KvCacheError(
                f"{request_id}: commit of {length}, {owner.committed} committed, {self._length(owner)} reserved"
            )
        owner.committed = length

    def rollback(self, request_id: str) -> None:
        """Give back the pages that lie wholly beyond the committed positions."""
        owner = self._owners[request_id]
        keep = -(-owner.committed // self.page_size)
        if keep < len(owner.pages):
            self._free.extend(owner.pages[keep:])
            del owner.pages[keep:]

    def release(self, request_id: str) -> None:
        """Give back everything a request owns; nothing happens if it owns nothing."""
        owner = self._owners.pop(request_id, None)
        if owner is not None:
            self._free.extend(owner.pages)

    def slots(self, request_id: str) -> Tensor:
        """Slot of every reserved position: int64, on the host; a view that the next ``reserve`` may outdate."""
        owner = self._owners[request_id]
        return torch.from_numpy(owner.slots[: self._length(owner)])

    def committed(self, request_id: str) -> int:
        """Number of leading positions whose KV is final (0 for a request that owns nothing)."""
        owner = self._owners.get(request_id)
        return owner.committed if owner else 0

    def check(self) -> None:
        """Hold the books against each other.

        Raises:
            KvCacheError: a page is lost, owned twice, or a request's books are wrong.
        """
        owned = [page for owner in self._owners.values() for page in owner.pages]
        if sorted([*owned, *self._free]) != list(range(self.num_pages)):
            raise KvCacheError(
                f"{len(owned)} owned and {len(self._free)} free pages are not the {self.num_pages} of the pool"
            )
        for request_id, owner in self._owners.items():
            length = self._length(owner)
            right = [page * self.page_size + i for page in owner.pages for i in range(self.page_size)]
            if owner.slots[:length].tolist() != right or owner.committed > length:
                raise KvCacheError(f"{request_id}: slots and pages disagree, or more is committed than reserved")

    def _missing_pages(self, request_id: str, length: int) -> int:
        owner = self._owners.get(request_id)
        return -(-length // self.page_size) - (len(owner.pages) if owner else 0)

    def _length(self, owner: _Owner) -> int:
        return len(owner.pages) * self.page_size

    def _add_page(self, owner: _Owner, page: int) -> None:
        start, end = self._length(owner), self._length(owner) + self.page_size
        if end > len(owner.slots):
            owner.slots = np.concatenate((owner.slots[:start], np.empty(max(start, self.page_size), np.int64)))
        owner.slots[start:end] = np.arange(page * self.page_size, (page + 1) * self.page_size)
        owner.pages.append(page)
