"""mlx-lm's generators and `LLM` on one model, in turn and at once, while `install`, `uninstall` and `close` happen."""

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, so that nothing was installed or hooked before.
PROGRAM = """
import copy, importlib, sys, threading
from collections import Counter
import onekv.mlx_lm
import mlx.core as mx
from architectures import build
from mlx_lm.models import cache as caches
from onekv import LLM
from onekv.memory import hook, looped

mx.disable_compile()
COUNT = 24
lengths = {7: 70, 5: 33, 3: 51}
prompts = [[factor * i % 61 + 1 for i in range(length)] for factor, length in lengths.items()]
model = build(sys.argv[1])
module = importlib.import_module("mlx_lm.generate")


def steps(prompt, **options):
    for token, _ in module.generate_step(mx.array(prompt), model, max_tokens=COUNT, **options):
        yield int(token)


def batch(prompts):
    generator = module.BatchGenerator(model)
    uids = generator.insert(prompts, [COUNT] * len(prompts))
    while True:
        responses = generator.next()[1]
        if responses:
            yield [(uids.index(response.uid), response.token) for response in responses]
        if sum(response.finish_reason is not None for response in responses) == len(prompts):
            generator.close()
            return


expected = [list(steps(prompt)) for prompt in prompts]
in_batch = [tokens for tokens in batch(prompts)]
assert not hook.hooked and onekv.mlx_lm.replaced() == []

# Which of OneKV's caches attended where their KV lies: onekv.memory has the layers of an LLM, onekv.mlx_lm the others.
attended = Counter()


def count(cache):
    attend = cache.attend

    def counted(self, *arguments):
        out = attend(self, *arguments)
        attended[cache.__module__.split(".")[1]] += out is not None
        return out

    cache.attend = counted


def kinds(kind):
    return {kind}.union(*map(kinds, kind.__subclasses__()))


for kind in kinds(hook.Attends):
    if "attend" in vars(kind):
        count(kind)


attend_by_loops = looped._attend


def counted_by_loops(*arguments):
    attended["memory"] += 1
    return attend_by_loops(*arguments)


looped._attend = counted_by_loops


def made():
    return LLM(model, kv_memory="4MB", block_size=16, prefill_chunk=24, max_batch=2, check_integrity=True)


def alternate(ours, streams):
    # One token of each side in turn; what mlx-lm's side gave.
    given = []
    while ours is not None or streams:
        if ours is not None:
            token = next(ours, None)
            given += [token] if token is not None else []
            ours = ours if token is not None else None
        streams = [stream for stream in streams if next(stream, None) is not None]
    return given


def check(llm, ours, prompt, others):
    attended.clear()
    streams = [llm.stream(other, COUNT) for other in others]
    given = alternate(ours, list(streams))
    assert given == prompt, (given, prompt)
    for stream, other in zip(streams, others):
        tokens, wanted = stream.completion.tokens, expected[prompts.index(other)]
        assert tokens == wanted, (tokens, wanted)
    assert attended["memory"]


# mlx-lm first, then an LLM is made while mlx-lm generates, before anything is installed.
running = steps(prompts[0])
first = [next(running) for _ in range(5)]
llm = made()
check(llm, running, expected[0][5:], prompts[1:])

# Installed while both generate; uninstalled while both generate; the caches that exist go on.
running, stream = steps(prompts[1]), llm.stream(prompts[2], COUNT)
given = [next(running) for _ in range(5)]
next(stream)
onekv.mlx_lm.install("64MB")
check(llm, steps(prompts[0]), expected[0], prompts[:2])
ours = steps(prompts[2])
started = [next(ours) for _ in range(5)]
onekv.mlx_lm.uninstall()
assert given + list(running) == expected[1]
for _ in stream:
    pass
assert stream.completion.tokens == expected[2]
check(llm, ours, expected[2][5:], prompts[:2])
assert started == expected[2][:5]

# Closed while mlx-lm generates, and made again with everything installed; a batch beside a batch.
onekv.mlx_lm.install()
running = steps(prompts[0])
given = [next(running) for _ in range(5)]
llm.close()
given += [next(running) for _ in range(5)]
llm = made()
assert given + list(running) == expected[0]
check(llm, batch(prompts), in_batch, prompts)

assert attended["mlx_lm"]

# A conversation that two go on with: one of them in a slab of its own.
held = caches.make_prompt_cache(model)
for _ in module.generate_step(mx.array(prompts[0][:-1]), model, max_tokens=0, prompt_cache=held):
    pass
pair = [steps(prompts[0][-1:], prompt_cache=held), steps(prompts[0][-1:], prompt_cache=copy.deepcopy(held))]
check(llm, pair[0], expected[0], prompts[1:])
check(llm, pair[1], expected[0], prompts[1:])
assert attended["mlx_lm"]

# An LLM that is made before another one is closed, and mlx-lm by itself at the end.
other = made()
check(other, steps(prompts[1]), expected[1], prompts[:1])
llm.close()
check(other, steps(prompts[1]), expected[1], prompts[:1])

# Each in a thread of its own, at the same time.
found = []
thread = threading.Thread(target=lambda: found.extend(list(steps(prompt)) for prompt in prompts * 2))
thread.start()
beside = []
while thread.is_alive():
    beside += [completion.tokens for completion in other.generate(prompts, max_tokens=COUNT)]
    other.clear_cache()
thread.join()
assert found == expected * 2 and beside and beside == expected * (len(beside) // len(prompts))
other.close()
assert [list(steps(prompt)) for prompt in prompts] == expected
onekv.mlx_lm.uninstall()
assert [list(steps(prompt)) for prompt in prompts] == expected
assert onekv.mlx_lm.replaced() == []
print("same")
"""


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_both_give_stock_tokens(name: str) -> None:
    """Full attention, windows, and recurrent states."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "same\n"
