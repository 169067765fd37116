"""Who runs in the next step. Pure bookkeeping: no tensors, no clock.

First come, first served. Prefill chunks and decode rounds take turns when both have work, so that neither starves. When the
KV pool is full, the request that arrived last gives its pages back and waits again.
"""

from collections import deque
from collections.abc import Callable

from tiercel.core.batch import Batch, ForwardMode
from tiercel.core.config import EngineConfig
from tiercel.core.request import FinishReason, Request, RequestStatus
from tiercel.kvcache.manager import KvCacheManager


class Scheduler:
    """Keeps the waiting queue and the admitted requests, and reserves the KV slots of what it schedules.

    Args:
        config: limits.
        kv: the pool.
        num_steps: positions drafted for per round at most.
        on_preempt: called with a request whose pages were taken back.
        num_draft_tokens: drafts per round at most; more than ``num_steps`` where they form trees.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KvCacheManager,
        num_steps: int,
        on_preempt: Callable[[Request], None],
        num_draft_tokens: int = 0,
    ) -> None:
        self.extra_drafts = max(0, num_draft_tokens - num_steps)
        self.config, self.kv, self.num_steps, self.on_preempt = config, kv, num_steps, on_preempt
        self.waiting: deque[Request] = deque()
        self.admitted: list[Request] = []  # by arrival; prefilling or running
        self._decoded_last = True

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.admitted)

    def add(self, req: Request) -> None:
        """Put a new request at the end of the queue."""
        self.waiting.append(req)

    def remove(self, req: Request) -> None:
        """Forget a finished or aborted request and give its pages back."""
        if req in self.admitted:
            self.admitted.remove(req)
        elif req in self.waiting:
            self.waiting.remove(req)
        self.kv.release(req.request_id)
        req.status = RequestStatus.FINISHED

    def schedule(self) -> Batch | None:
        """The next step's batch, its slots reserved.

        Returns:
            None if nothing can run. A request that cannot even run alone is ended with ``FinishReason.ERROR`` and left in
            ``admitted`` for the engine to clear away.
        """
        if self._decoded_last or not self._running():
            batch = self._schedule_extend()
            if batch is not None:
                self._decoded_last = False
                return batch
        self._decoded_last = True
        return self._schedule_decode()

    def update(self, batch: Batch) -> None:
        """Take in what a step has done: requests whose prefill is complete start to decode."""
        for req in batch.reqs:
            if batch.mode is ForwardMode.EXTEND and req.output_token_ids and req.num_computed == len(req.token_ids) - 1:
                req.status = RequestStatus.RUNNING

    def _running(self) -> list[Request]:
        return [r for r in self.admitted if r.status is RequestStatus.RUNNING and not r.is_finished]

    def _schedule_extend(self) -> Batch | None:
        self._admit()
        batch, budget = Batch(ForwardMode.EXTEND, []), self.config.max_prefill_tokens
        for req in self.admitted:
            if req.status is RequestStatus.PREFILLING and budget > 0:
                end = min(_extend_target(req), req.num_computed + budget)
                budget -= end - req.num_computed
                batch.reqs.append(req)
                batch.extend_ends.append(end)
        return batch if batch.reqs else None

    def _admit(self) -> None:
        while self.waiting and len(self.admitted) < self.config.max_batch_size:
            req = self.waiting[0]
            # Room for the first round too: otherwise a request could be admitted only to be preempted at once.
            room = min(len(req.token_ids) + 1 + self.num_steps + self.extra_drafts, self.kv.num_slots_total)
            if not self.kv.can_reserve(req.request_id, room):
                return
            self.kv.reserve(req.request_id, _extend_target(req))
            req.status = RequestStatus.PREFILLING
            self.admitted.append(self.waiting.popleft())

    def _schedule_decode(self) -> Batch | None:
        batch = Batch(ForwardMode.DECODE, [])
        for req in self._running():
            if req.status is RequestStatus.RUNNING and self._make_room(req):
                batch.reqs.append(req)
        return batch if batch.reqs else None

    def _make_room(self, req: Request) -> bool:
        """Reserve the slots of ``req``'s round, taking pages from later arrivals; False if ``req`` itself had to yield."""
        depth = req.draft_depth(self.num_steps)
        need = len(req.token_ids) + depth
        if depth and self.extra_drafts:  # a tree becomes as small as it must where the pool is all there is
            need = max(need, min(need + self.extra_drafts, self.kv.num_slots_total))
        while not self.kv.can_reserve(req.request_id, need):
            victim = next(r for r in reversed(self.admitted) if not r.is_finished)
            if victim is req and self.admitted[0] is req:
                req.finish_reason = FinishReason.ERROR
                req.error = (
                    f"the KV pool of {self.kv.num_slots_total} tokens is too small for {need} tokens; raise kv_tokens"
                )
                return False
            self._preempt(victim)
            if victim is req:
                return False
        self.kv.reserve(req.request_id, need)
        return True

    def _preempt(self, req: Request) -> None:
        self.kv.release(req.request_id)
        self.admitted.remove(req)
        req.status, req.num_computed = RequestStatus.WAITING, 0
        req.num_preemptions += 1
        self.waiting.appendleft(req)
        self.on_preempt(req)


def _extend_target(req: Request) -> int:
    """Where prefill ends: at the last prompt token, or, resuming, before the last token, which the next round reads."""
    return len(req.token_ids) - bool(req.output_token_ids)
