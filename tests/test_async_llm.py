"""The library for an event loop: the same answers as LLM, and nothing left behind however a reader goes away."""

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest

from architectures import VOCAB, build
from onekv import LLM, AsyncLLM, OneKVError
from onekv.errors import OverloadedError, PromptError, RequestFailedError, SettingError
from onekv.memory.pool import IntegrityError

SETTINGS = {"kv_memory": "1MB", "block_size": 16}


def prompt(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, VOCAB, length)]


PROMPTS = [prompt(10 + 7 * seed, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(build("llama"), **SETTINGS) as llm:
        return [completion.tokens for completion in llm.generate(PROMPTS, 12)]


def with_llm(work, **settings):
    """Run `work(llm)` on a loop of its own; afterwards nothing is held."""

    async def main():
        async with AsyncLLM(build("llama"), **SETTINGS | settings) as llm:
            result = await work(llm)
            await quiet(llm)
            return result

    return asyncio.run(main())


async def quiet(llm: AsyncLLM) -> None:
    stats = await llm.call(LLM.stats)
    assert (stats.running, stats.waiting, stats.pools[0].held, stats.pools[0].reserved) == (0, 0, 0, 0)
    await llm.call(LLM.check_integrity)


class Held:
    """A logits processor that keeps the engine waiting before more than `free` tokens of a prompt, until released."""

    def __init__(self, free: int) -> None:
        self._free, self._drawn = free, Counter()
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self, tokens, logits):
        prompt = tuple(tokens[: len(PROMPTS[0])])
        self._drawn[prompt] += 1
        if self._drawn[prompt] > self._free:
            assert self.released.wait(60)
        self.begun.set()
        return logits


def test_the_tokens_are_those_of_llm(expected):
    async def work(llm):
        assert (await llm.generate(PROMPTS[0], 12)).tokens == expected[0]
        assert [c.tokens for c in await llm.generate(PROMPTS, max_tokens=12)] == expected
        together = await asyncio.gather(*(llm.generate(each, 12) for each in PROMPTS))
        assert [c.tokens for c in together] == expected
        stream = llm.stream(PROMPTS[1], 12)
        assert [delta async for delta in stream] != []
        assert stream.completion.tokens == expected[1]
        assert stream.completion.finish_reason == "length"

    with_llm(work)


def test_a_batch_comes_as_it_is_generated(expected):
    async def work(llm):
        # The first does not end before the last has begun.
        held, order = Held(free=11), []
        batch = llm.stream(PROMPTS, 12, logits_processors=[held])
        async for index, _ in batch:
            order.append(index)
            if index == 3:
                held.released.set()
        assert [c.tokens for c in batch.completions] == expected
        assert order.index(3) < len(order) - 1 - order[::-1].index(0)

    with_llm(work)


def test_cancelling_the_task_aborts_its_request(expected):
    async def work(llm):
        kept = []
        for call in (
            lambda **options: llm.generate(PROMPTS[:2], 200, **options),
            lambda **options: everything(llm.stream(PROMPTS[0], 200, **options)),
            lambda **options: everything(kept.append(llm.stream(PROMPTS[0], 200, **options)) or kept[0]),
        ):
            started, held = llm.stream(PROMPTS[2], 12), Held(free=1)
            task = asyncio.create_task(call(logits_processors=[held]))
            assert await asyncio.to_thread(held.begun.wait, 60)
            await anext(started)
            task.cancel()
            held.released.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            await everything(started)
            assert started.completion.tokens == expected[2]
            await quiet(llm)

    with_llm(work, kv_memory="2MB")


async def everything(stream) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize("how", ["aclose", "async with", "break", "drop"])
def test_closing_or_dropping_a_stream_aborts_it(how):
    async def work(llm):
        if how == "async with":
            async with llm.stream(PROMPTS[0], 200) as stream:
                await anext(stream)
        elif how == "break":
            async for _ in llm.stream(PROMPTS[0], 200):
                break
        else:
            stream = llm.stream(PROMPTS[0], 200)
            await anext(stream)
            if how == "aclose":
                await stream.aclose()
        if how in ("aclose", "async with"):
            assert stream.completion.finish_reason == "cancelled"
            assert 0 < len(stream.completion.tokens) < 200
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        if how == "drop":
            del stream
        await quiet(llm)

    with_llm(work)


def test_abort_by_name_gives_what_there_is():
    async def work(llm):
        stream = llm.stream(PROMPTS[0], 200, request_id="one")
        whole = asyncio.create_task(llm.generate(PROMPTS[1], 200, request_id="two"))
        await anext(stream)
        while (await llm.call(LLM.stats)).running < 2:
            await asyncio.sleep(0)
        with pytest.raises(SettingError, match="request_id is 'one', which another call in flight already has"):
            llm.stream(PROMPTS[2], 5, request_id="one")
        llm.abort("one")
        llm.abort("two")
        llm.abort("nobody")
        await everything(stream)
        for completion in (stream.completion, await whole):
            assert completion.finish_reason == "cancelled"
            assert len(completion.tokens) < 200
        # The name is free again.
        assert len((await llm.generate(PROMPTS[2], 5, request_id="one")).tokens) == 5

    with_llm(work)


def test_errors_are_those_of_llm(expected):
    async def work(llm):
        for wrong, options, error, text in (
            ([], {}, PromptError, "the prompt is empty"),
            ("Hi", {}, PromptError, "a text prompt needs the model's tokenizer"),
            ([1], {"tempreture": 1}, SettingError, "did you mean temperature"),
            ([1] * 10**5, {}, OneKVError, "raise --kv-memory"),
        ):
            with pytest.raises(error, match=text):
                await llm.generate(wrong, **options)
            with pytest.raises(error, match=text):
                llm.stream(wrong, **options)
        fails = {"logits_processors": [lambda tokens, logits: 1 // 0]}
        good = llm.stream(PROMPTS[0], 12)
        for call in (llm.generate(PROMPTS[1], 5, **fails), everything(llm.stream(PROMPTS[1:3], 5, **fails))):
            with pytest.raises(RequestFailedError, match="a logits processor failed"):
                await call
        await everything(good)
        assert good.completion.tokens == expected[0]

    with_llm(work)


def test_outside_of_async_with_it_says_so():
    async def main():
        llm = AsyncLLM(build("llama"), **SETTINGS)
        assert repr(llm) == "AsyncLLM(not open)"
        with pytest.raises(OneKVError, match="not open; use `async with`"):
            llm.stream([1])
        async with llm:
            assert repr(llm).startswith("AsyncLLM(mlx_lm.models.llama, KV pool")
            stream = llm.stream(PROMPTS[0], 300)
            await anext(stream)
        with pytest.raises(OverloadedError, match="the LLM was closed; the answer was cut off"):
            await everything(stream)
        with pytest.raises(OneKVError, match="this LLM is closed"):
            await llm.generate([1])

    asyncio.run(main())


def test_what_building_raises_is_raised_on_entering():
    async def main():
        async with AsyncLLM(build("llama"), kv_memory="1"):
            raise AssertionError("it must not open")

    with pytest.raises(OneKVError):
        asyncio.run(main())


def test_too_many_are_refused_at_once():
    async def work(llm):
        first = [llm.stream(each, 100) for each in PROMPTS[:2]]
        with pytest.raises(OverloadedError, match="--max-waiting"):
            llm.stream(PROMPTS[2], 5)
        for stream in first:
            await stream.aclose()

    with_llm(work, max_batch=1, max_waiting=1)


def test_what_came_while_the_loop_was_busy_is_handed_over_at_once(expected):
    async def work(llm):
        loop, wakes = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *call: (wakes.append(threading.current_thread().name), wake(*call))
        batch, alone = llm.stream(PROMPTS[:2], 12), [llm.stream(each, 12) for each in PROMPTS[2:]]
        # The loop is kept from turning until all have ended.
        while llm.thread.open_jobs:
            time.sleep(0.01)
        del loop.call_soon_threadsafe
        assert wakes == ["onekv-engine"]
        assert [index async for index, _ in batch] == [0, 1]
        for stream in alone:
            assert len([delta async for delta in stream]) == 1
        assert [c.tokens for c in (*batch.completions, *(stream.completion for stream in alone))] == expected

    with_llm(work)


def test_the_default_model_by_name_speaks(smollm2_path):
    async def main():
        async with AsyncLLM(kv_memory="64MiB", progress=False) as llm:
            messages = [{"role": "user", "content": "What is the capital of France? One word."}]
            assert "Paris" in (await llm.chat(messages, 20)).text
            text = "".join([delta async for delta in llm.stream_chat(messages, 20)])
            assert "Paris" in text
            free = await llm.generate("Count: one, two, three,", 16, temperature=0.5, seed=2)
            cut = await llm.generate("Count: one, two, three,", 16, temperature=0.5, seed=2, stop=free.text[5:8])
            assert cut.text == free.text[: free.text.index(free.text[5:8])]

    asyncio.run(main())


def test_a_block_that_is_lost_ends_it():
    async def main():
        async with AsyncLLM(build("llama"), check_integrity=True, **SETTINGS) as llm:
            await llm.call(lambda inner: inner.engine.memory.pools[0].reserve(1))
            with pytest.raises(IntegrityError):
                await llm.call(LLM.check_integrity)
            await everything(llm.stream(PROMPTS[0], 3))
            # The engine's thread gives up as soon as nothing runs.
            while llm.thread.alive:
                await asyncio.sleep(0.01)
            with pytest.raises(RequestFailedError, match="could not continue"):
                await llm.generate(PROMPTS[0], 3)

    asyncio.run(main())


SCRIPT = """
import asyncio
from onekv import AsyncLLM
from architectures import build

async def main():
    async with AsyncLLM(build("llama"), kv_memory="1MB", block_size=16) as llm:
        print(len((await llm.generate([1, 2, 3], 5)).tokens))

asyncio.run(main())
"""


def test_a_script_that_uses_it_ends_well():
    """Its process ends right after the engine's thread has."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd="tests", timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr
