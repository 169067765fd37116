"""The scheduler alone, with a worker that only counts: no model, so that thousands of requests take seconds."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from tiercel.core.batch import Batch, ForwardMode
from tiercel.core.config import EngineConfig
from tiercel.core.request import SOURCE_BONUS, FinishReason, Request, RequestStatus
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.scheduler import Scheduler
from tiercel.kvcache.manager import KvCacheManager

EOS = 0


def answer(prompt: list[int], length: int) -> list[int]:
    """The toy's whole answer: each token follows from the two before it; sometimes that is the EOS."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append((tokens[-1] * 7 + tokens[-2 % len(tokens)] * 3 + len(tokens)) % 23)
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


@dataclass
class Play:
    """Plays steps on real requests and a real pool, and holds every batch against the rules."""

    config: EngineConfig
    num_steps: int
    rng: random.Random
    modes: list[ForwardMode] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kv = KvCacheManager(self.config.kv_tokens, self.config.page_size)
        self.scheduler = Scheduler(self.config, self.kv, self.num_steps, lambda r: self.preempted.append(r.request_id))

    def add(self, name: str, prompt: list[int], max_tokens: int) -> Request:
        stats: Any = None  # the scheduler reads no clock
        req = Request(name, prompt, SamplingParams(max_tokens=max_tokens), 0, frozenset({EOS}), stats)
        self.scheduler.add(req)
        return req

    def step(self) -> Batch | None:
        could_extend = any(r.status is RequestStatus.PREFILLING for r in self.scheduler.admitted)
        could_decode = any(r.status is RequestStatus.RUNNING for r in self.scheduler.admitted)
        batch = self.scheduler.schedule()
        if batch is not None:
            self.hold_to_the_rules(batch, could_extend, could_decode)
            for index, req in enumerate(batch.reqs):
                self.read_prompt(req, batch.extend_ends[index]) if batch.extend_ends else self.play_round(req)
            self.scheduler.update(batch)
            self.modes.append(batch.mode)
        for req in [r for r in self.scheduler.admitted if r.is_finished]:
            self.scheduler.remove(req)
        self.kv.check()
        return batch

    def hold_to_the_rules(self, batch: Batch, could_extend: bool, could_decode: bool) -> None:
        assert 0 < len(batch.reqs) <= len(self.scheduler.admitted) <= self.config.max_batch_size
        assert len({r.request_id for r in batch.reqs}) == len(batch.reqs)
        if batch.mode is ForwardMode.EXTEND:
            rows = [end - r.num_computed for r, end in zip(batch.reqs, batch.extend_ends, strict=True)]
            assert min(rows) > 0
            assert sum(rows) <= self.config.max_prefill_tokens
            assert not (could_decode and self.modes[-1] is ForwardMode.EXTEND), "decode starves"
        else:
            assert not (could_extend and self.modes[-1] is ForwardMode.DECODE), "prefill starves"
            assert all(r.num_computed == len(r.token_ids) - 1 for r in batch.reqs)

    def read_prompt(self, req: Request, end: int) -> None:
        assert end <= len(self.kv.slots(req.request_id))
        req.num_computed = end
        self.kv.commit(req.request_id, end)
        if end == len(req.token_ids) and not req.output_token_ids:
            req.append_until_stop(answer(req.prompt_token_ids, 1), [SOURCE_BONUS])

    def play_round(self, req: Request) -> None:
        depth = req.draft_depth(self.num_steps)
        assert len(req.token_ids) + depth <= len(self.kv.slots(req.request_id))
        done = len(req.output_token_ids)
        tokens = answer(req.prompt_token_ids, done + self.rng.randint(0, depth) + 1)[done:]
        req.num_computed += len(tokens)
        self.kv.commit(req.request_id, req.num_computed)
        self.kv.rollback(req.request_id)
        req.append_until_stop(tokens, [SOURCE_BONUS] * len(tokens))


def played(seed: int = 0, num_steps: int = 3, **limits: Any) -> Play:
    return Play(EngineConfig(**{"kv_tokens": 64, "page_size": 4, **limits}), num_steps, random.Random(seed))


@pytest.mark.parametrize("seed", range(20))
def test_two_thousand_random_requests(seed: int) -> None:
    rng = random.Random(seed)
    play = played(
        seed,
        num_steps=rng.randint(0, 5),
        kv_tokens=rng.randint(60, 200),
        page_size=rng.randint(1, 9),
        max_batch_size=rng.randint(1, 8),
        max_prefill_tokens=rng.choice([1, 7, 16, 512]),
    )
    waiting = [[rng.randrange(1, 23) for _ in range(rng.randint(1, 30))] for _ in range(100)]
    reqs: list[Request] = []
    aborted: set[str] = set()
    idle = 0
    while waiting or play.scheduler.has_work:
        while waiting and rng.random() < 0.3:
            reqs.append(play.add(f"r{len(reqs)}", waiting.pop(), rng.randint(1, 20)))
        alive = [r for r in reqs if not r.is_finished]
        if alive and rng.random() < 0.03:
            victim = rng.choice(alive)
            victim.finish_reason = FinishReason.ABORT
            play.scheduler.remove(victim)
            aborted.add(victim.request_id)
        idle = 0 if play.step() else idle + 1
        assert idle < 3 or not play.scheduler.has_work, "work, but no step"
    assert play.kv.num_slots_used == 0
    for req in reqs:
        whole = answer(req.prompt_token_ids, req.sampling.max_tokens)
        got = req.output_token_ids
        assert got == whole or (req.request_id in aborted and got == whole[: len(got)])
        assert req.status is RequestStatus.FINISHED


def test_prefill_and_decode_take_turns() -> None:
    play = played(kv_tokens=512, max_prefill_tokens=4)
    play.add("first", [5] * 3, 40)
    play.step()
    play.add("second", [5] * 17, 40)
    for _ in range(10):
        play.step()
    assert "".join(mode[0] for mode in play.modes) == "e" + "de" * 5


def test_first_come_first_served_even_past_a_request_that_would_fit() -> None:
    play = played(kv_tokens=32)
    big, wide, small = play.add("big", [1] * 20, 8), play.add("wide", [1] * 20, 8), play.add("small", [1], 2)
    play.step()
    assert [r.status for r in (big, wide, small)] == [RequestStatus.RUNNING, *[RequestStatus.WAITING] * 2]
    order: list[Request] = []
    while play.scheduler.has_work:
        play.step()
        order += [r for r in (big, wide, small) if r.is_finished and r not in order]
    assert order.index(big) == 0


def test_several_prompts_share_one_extend_up_to_its_budget() -> None:
    play = played(max_prefill_tokens=10)
    for name, length in (("a", 4), ("b", 4), ("c", 5)):
        play.add(name, [1] * length, 3)
    batch = play.scheduler.schedule()
    assert batch is not None
    assert [r.request_id for r in batch.reqs] == ["a", "b", "c"]
    assert batch.extend_ends == [4, 4, 2]


def test_the_latest_arrival_yields_and_comes_back_first() -> None:
    play = played(kv_tokens=28, max_batch_size=2)
    old, young, queued = play.add("old", [5] * 8, 12), play.add("young", [9] * 8, 12), play.add("queued", [5] * 8, 2)
    while not play.preempted:
        play.step()
    assert play.preempted == ["young"]
    assert list(play.scheduler.waiting) == [young, queued]
    assert (young.num_computed, young.num_preemptions) == (0, 1)
    assert play.kv.committed("young") == 0
    kept = list(young.output_token_ids)
    while play.scheduler.has_work:
        play.step()
    assert young.output_token_ids[: len(kept)] == kept
    for req in (old, young, queued):
        assert req.output_token_ids == answer(req.prompt_token_ids, req.sampling.max_tokens)


def test_a_request_too_large_for_the_whole_pool_ends_with_the_way_out() -> None:
    play = played(kv_tokens=16)
    req = play.add("a", [6] * 14, 40)
    steps = 0
    while play.scheduler.has_work:
        play.step()
        steps += 1
        assert steps < 20
    assert req.finish_reason is FinishReason.ERROR
    assert "kv_tokens" in str(req.error)
    assert play.kv.num_slots_used == 0
