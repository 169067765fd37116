"""Who may come in: a bounded queue, and nobody while the server drains."""

import asyncio
import math
from collections import Counter
from types import TracebackType
from typing import Self

from tiercel.server.errors import ApiError

SMOOTHING = 0.1
"""Weight of the latest answer in the usual time of one."""


class Gate:
    """Counts the answers under way.

    Args:
        num_slots: answers that run at once.
        max_queue: answers that may wait beyond them.
    """

    def __init__(self, num_slots: int, max_queue: int) -> None:
        self._num_slots, self._limit = num_slots, num_slots + max_queue
        self._usual_s = 1.0
        self.num_open = self.num_received = 0
        self.ended: Counter[str] = Counter()
        """Answers by how they ended; with the open ones they make up those received."""
        self.is_draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    def admit(self, count: int) -> "Ticket":
        """Room for so many answers of one request.

        Raises:
            ApiError: 503 while the server drains, 429 where the queue is full.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": "5"})
        if self.num_open + count > self._limit:
            wait = math.ceil(self._usual_s * max(1, self.num_open / self._num_slots))
            raise ApiError(
                429,
                f"{self.num_open} answers are running or waiting, and {self._limit} are the limit: try again in {wait} s",
                code="queue_full",
                headers={"Retry-After": str(min(wait, 60))},
            )
        self.num_received += count
        self._change(count)
        return Ticket(self, count)

    def learn(self, seconds: float) -> None:
        """An answer took so long once it ran."""
        self._usual_s += SMOOTHING * (seconds - self._usual_s)

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; False if that takes too long."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _change(self, by: int) -> None:
        self.num_open += by
        if self.num_open:
            self._empty.clear()
        else:
            self._empty.set()


class Ticket:
    """Room for answers, held until each has ended. Those that nobody has ended when it is released, the client has left."""

    def __init__(self, gate: Gate, count: int) -> None:
        self._gate, self._count = gate, count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def end(self, how: str, count: int = 1) -> None:
        """So many answers have ended."""
        count = min(count, self._count)
        self._count -= count
        self._gate.ended[how] += count
        self._gate._change(-count)

    def release(self, how: str = "disconnected") -> None:
        """Give back what room is left."""
        self.end(how, self._count)
