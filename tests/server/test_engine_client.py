"""The engine in its own process, against ``LLM.generate`` in this one."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import LoadedTarget
from tiercel.engine.llm import LLM
from tiercel.server.engine_client import EngineClient, EngineDied
from tiercel.server.messages import EngineSettings, Tokens

LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


def settings(model: Path, draft: Path) -> EngineSettings:
    engine = EngineConfig(model=str(model), dtype="float32", max_batch_size=4)
    return EngineSettings(engine, SpecConfig(draft=str(draft), num_steps=2), TraceConfig())


def play(chosen: EngineSettings, scene: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def whole() -> None:
        client = EngineClient(chosen)
        try:
            await client.ready()
            await scene(client)
            assert client.num_open == 0
        finally:
            await client.close()

    asyncio.run(whole())


async def collect(client: EngineClient, name: str, prompt: list[int], sampling: SamplingParams) -> list[Tokens]:
    return [tokens async for tokens in client.stream(name, prompt, sampling)]


async def until(holds: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.01)


def idle(client: EngineClient) -> bool:
    return client.load is not None and (client.load.running, client.load.waiting, client.load.kv_slots_used) == (
        0,
        0,
        0,
    )


def test_streams_at_once_equal_generate_and_a_wrong_request_fails_alone(
    toy_model: Path, toy_draft: Path, toy_native: LoadedTarget
) -> None:
    chosen = settings(toy_model, toy_draft)
    prompts = [[5, 6, 7 + i] * (1 + i) for i in range(6)]
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(engine=chosen.engine, spec=chosen.spec, target=toy_native) as llm:
        expected = [out.token_ids for out in llm.generate(prompts, sampling)]

    async def scene(client: EngineClient) -> None:
        work = [collect(client, f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
        wrong = collect(client, "wrong", [5, 100000], sampling)
        *streams, refusal = await asyncio.gather(*work, wrong, return_exceptions=True)
        assert isinstance(refusal, UserError)
        assert "wrong" in str(refusal)
        for stream, token_ids in zip(streams, expected, strict=True):
            assert not isinstance(stream, BaseException)
            assert [t for tokens in stream for t in tokens.token_ids] == token_ids
            assert [tokens.record is not None for tokens in stream] == [False] * (len(stream) - 1) + [True]
            record = stream[-1].record
            assert record is not None
            assert record.completion_tokens == 24
        await until(lambda: idle(client), 2)

    play(chosen, scene)


def test_who_leaves_frees_everything_within_a_second(toy_model: Path, toy_draft: Path) -> None:
    async def scene(client: EngineClient) -> None:
        reader = asyncio.create_task(collect(client, "cancelled", [5, 6, 7], LONG))
        stream = client.stream("left", [5, 6, 8], LONG)
        await anext(stream)
        assert not idle(client)
        await stream.aclose()  # type: ignore[attr-defined]
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await until(lambda: idle(client), 1)
        assert (await collect(client, "left", [5, 6, 8], SamplingParams(max_tokens=2)))[-1].record is not None

    play(settings(toy_model, toy_draft), scene)


def test_a_killed_engine_ends_every_stream_at_once(toy_model: Path, toy_draft: Path) -> None:
    async def scene(client: EngineClient) -> None:
        streams = [asyncio.create_task(collect(client, f"r{i}", [5, 6, 7], LONG)) for i in range(3)]
        await until(lambda: client.load is not None and client.load.running == 3, 5)
        assert client.is_alive
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 1)
        assert [type(end) for end in ends] == [EngineDied] * 3
        await until(lambda: not client.is_alive, 1)
        with pytest.raises(EngineDied):
            await collect(client, "late", [5], LONG)

    play(settings(toy_model, toy_draft), scene)


def test_a_model_that_is_not_there_is_the_users_mistake(tmp_path: Path, toy_draft: Path) -> None:
    with pytest.raises(UserError, match="nothing-here"):
        play(settings(tmp_path / "nothing-here", toy_draft), collect)  # type: ignore[arg-type]
