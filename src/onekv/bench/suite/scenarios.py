"""What clients do, and what is measured.

A scenario is an async function over a `Session`: a fresh server of one contender. Times are measured by the client;
answers are streamed and greedy. `text` is a source of text that no other measurement has used, so that none is cached.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import chain

from ..clients import Answer, words
from .contenders import Needs
from .session import Figures, Messages, Session


@dataclass(frozen=True)
class Figure:
    """What a figure is called, in which unit, and whether more of it is better."""

    title: str
    unit: str
    more: bool = False


_ONE = Needs()
MOST_ANSWERS = 8
FIRST = Figure("time to first token", "s")
SPEED = Figure("generated tokens per second, in total", "tokens/s", more=True)
PEAK = Figure("peak of the process", "B")
GROWTH = Figure("growth of the process", "B")


@dataclass(frozen=True)
class Scenario:
    """`figures` are those that `run` gives; the first one decides who wins. `bound` says what limits it."""

    about: str
    run: Callable[[Session], Awaitable[Figures]]
    figures: Mapping[str, Figure]
    bound: str
    needs: Needs = _ONE
    # A figure that must not exceed another one.
    no_higher: tuple[str, str] | None = None


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def _turn(session: Session, messages: Messages, tokens: int, max_tokens: int) -> Answer:
    """Ask something new, and add question and answer to `messages`."""
    messages.append(_said("user", f"{words(session.text, tokens)} What comes next?"))
    answer = await session.ask(messages, max_tokens)
    messages.append(_said("assistant", answer.text))
    return answer


async def _decoded(session: Session, messages: Messages, tokens: int) -> list[Answer]:
    """Answers of at least this many tokens together: a model may end one early, and a few tokens tell no speed."""
    answers: list[Answer] = []
    while sum(each.generated for each in answers) < tokens and len(answers) < MOST_ANSWERS:
        messages.append(_said("user", f"{words(session.text, session.sizes.new // 4)} Write a long story about that."))
        answers.append(await session.ask(messages, tokens))
        messages.append(_said("assistant", answers[-1].text))
    return answers


def _speed(answers: list[Answer]) -> float:
    """Tokens per second after the first token of each answer."""
    seconds = sum(each.total - each.first for each in answers)
    return sum(each.generated - 1 for each in answers) / seconds if seconds > 0 else 0.0


def _read(rows: int, answers: list[Answer]) -> Figures:
    """What every step reads (`limits`): how many rows there were, and how many tokens each had, on average."""
    tokens = statistics.mean(each.prompt_tokens + each.generated / 2 for each in answers)
    return {"rows": rows, "row_tokens": tokens}


def _memory(session: Session) -> Figures:
    found = {"peak": session.peak(), "growth": session.growth()}
    return {name: size for name, size in found.items() if size is not None}


async def reuse(session: Session) -> Figures:
    sizes, messages = session.sizes, list[dict[str, str]]()
    with session.phase("first turn"):
        await _turn(session, messages, sizes.context, sizes.answer)
    with session.phase("second turn"):
        second = await _turn(session, messages, sizes.new, sizes.answer)
    return {"first": second.first, **_memory(session)}


async def flat(session: Session) -> Figures:
    sizes = session.sizes
    for number in range(sizes.turns):
        with session.phase(f"conversation {number + 1}"):
            await _turn(session, [], sizes.context // 2, sizes.answer)
    after = [session.peak(f"conversation {number}") for number in (1, sizes.turns)]
    rise = {"rise": after[1] - after[0]} if after[0] is not None and after[1] is not None else {}
    return {**rise, **_memory(session)}


async def share(session: Session) -> Figures:
    sizes = session.sizes
    system = _said("system", f"You are a helpful assistant. {words(session.text, sizes.context)}")

    async def chat() -> list[Answer]:
        messages = [system]
        return [await _turn(session, messages, sizes.new, sizes.answer) for _ in range(2)]

    with session.phase("chats"):
        chats = await asyncio.gather(*(chat() for _ in range(sizes.clients)))
    firsts = [answer.first for answers in chats for answer in answers]
    return {"first": statistics.mean(firsts), **_memory(session)}


async def join(session: Session) -> Figures:
    sizes = session.sizes
    # Compiles what is used for the first time.
    await _turn(session, [], sizes.new, 2)
    with session.phase("both"):
        long = asyncio.create_task(_turn(session, [], 2 * sizes.context, 2))
        await asyncio.sleep(0.5)
        short = await _turn(session, [], sizes.new // 2, 8)
        await long
    return {"first": short.first, **_memory(session)}


async def agent(session: Session) -> Figures:
    sizes = session.sizes
    messages = [_said("system", f"You are a careful agent. {words(session.text, sizes.context // 2)}")]
    with session.phase("turns"):
        answers = [await _turn(session, messages, 2 * sizes.new, sizes.answer) for _ in range(sizes.turns)]
    return {"total": sum(answer.total for answer in answers), **_memory(session)}


async def concurrent(session: Session) -> Figures:
    sizes = session.sizes
    await _turn(session, [], sizes.new, 2)
    with session.phase("answers"):
        chats = [_decoded(session, [], 4 * sizes.answer) for _ in range(sizes.clients)]
        answers = await asyncio.gather(*chats)
    return {"speed": sum(map(_speed, answers)), **_read(sizes.clients, [*chain(*answers)]), **_memory(session)}


async def restart(session: Session) -> Figures:
    sizes, messages = session.sizes, list[dict[str, str]]()
    with session.phase("before"):
        await _turn(session, messages, sizes.context, sizes.answer)
    await session.restart()
    # Of the model, not of the conversation.
    await _turn(session, [], sizes.new // 2, 2)
    with session.phase("after"):
        answer = await _turn(session, messages, sizes.new, sizes.answer)
    return {"first": answer.first, "restored": answer.prompt_tokens - sizes.new, **_memory(session)}


async def formats(session: Session) -> Figures:
    sizes, messages = session.sizes, list[dict[str, str]]()
    await _turn(session, messages, sizes.context, 2)
    with session.phase("decode"):
        answers = await _decoded(session, messages, 2 * sizes.answer)
    return {"speed": _speed(answers), **_read(1, answers), **_memory(session)}


async def swap(session: Session) -> Figures:
    sizes, firsts = session.sizes, []
    await session.ask([_said("user", words(session.text, sizes.new))], 2, model=0)
    with session.phase("swaps"):
        for number in (1, 0, 1):
            answer = await session.ask([_said("user", words(session.text, sizes.new))], 2, model=number)
            firsts.append(answer.first)
    return {"first": statistics.median(firsts), **_memory(session)}


async def speculate(session: Session) -> Figures:
    passage = words(session.text, session.sizes.context // 8)
    prompt = f"Repeat this text word for word, twice:\n\n{passage}\n\nThe text again:\n\n{passage}\n\nAnd again:"
    await _turn(session, [], session.sizes.new, 2)
    with session.phase("repetition"):
        answer = await session.ask([_said("user", prompt)], 4 * session.sizes.answer)
    return {"speed": _speed([answer]), **_memory(session)}


async def phases(session: Session) -> Figures:
    sizes = session.sizes
    prompt = [_said("user", f"{words(session.text, 2 * sizes.context)} What comes next?")]
    with session.phase("first prefill"):
        first = await session.ask(prompt, 1)
    with session.phase("decode"):
        await session.ask(prompt, 2 * sizes.answer)
    with session.phase("after decode"):
        await asyncio.sleep(1)
    with session.phase("second prefill"):
        second = await session.ask(prompt, 1)
    peaks = {figure: await session.mlx_peak(name) for figure, (name, _) in _PEAKS.items()}
    known = {figure: peak for figure, peak in peaks.items() if peak is not None}
    return {"first": second.first, "prefill": first.first, **known, **_memory(session)}


# For each figure: the phase, and how the report words it.
_PEAKS = {
    "load_peak": ("load", "while it loads"),
    "first_peak": ("first prefill", "during the first prefill"),
    "decode_peak": ("decode", "during decode"),
    "after_peak": ("after decode", "after decode"),
    "second_peak": ("second prefill", "during the second prefill"),
}
_SPEED = {"speed": SPEED, "peak": PEAK, "growth": GROWTH}
_DECODE = {**_SPEED, "roofline": Figure("share of the speed at which memory can be read", "%", more=True)}
_FIRST = {"first": FIRST, "peak": PEAK, "growth": GROWTH}
_COMPUTED = "how many tokens of the prompt are computed again"

SCENARIOS: dict[str, Scenario] = {
    "reuse": Scenario("the second turn of a long conversation", reuse, _FIRST, _COMPUTED),
    "flat": Scenario(
        "conversations one after another",
        flat,
        {"rise": Figure("peak in the last conversation minus that in the first", "B"), "peak": PEAK, "growth": GROWTH},
        "whether caches grow beside what is already there",
    ),
    "share": Scenario("concurrent chats with one system prompt", share, _FIRST, _COMPUTED),
    "join": Scenario(
        "a short request that arrives during a long prompt", join, _FIRST, "how long a prefill step in flight takes"
    ),
    "agent": Scenario(
        "an agent's turns, each with the whole conversation",
        agent,
        {"total": Figure("total time", "s"), "peak": PEAK, "growth": GROWTH},
        _COMPUTED,
    ),
    "concurrent": Scenario(
        "concurrent answers",
        concurrent,
        _DECODE,
        "memory bandwidth: every step reads the weights and the KV of all sequences",
    ),
    "restart": Scenario(
        "a conversation continued after a restart of the server",
        restart,
        {**_FIRST, "disk": Figure("reading its KV at the raw speed of the disk", "s")},
        "reading its KV from disk, or else computing it again",
        Needs(restarts=True),
    ),
    "formats": Scenario(
        "decode with quantized KV",
        formats,
        _DECODE,
        "reading weights; at long contexts, reading KV",
        Needs(
            variants={
                "plain": ((), ()),
                "q8": (("--kv-format", "q8"), ("--kv-bits", "8", "--quantized-kv-start", "0")),
                "q4": (("--kv-format", "q4"), ("--kv-bits", "4", "--quantized-kv-start", "0")),
            }
        ),
    ),
    "swap": Scenario(
        "requests to two models in turn, with room for one",
        swap,
        _FIRST,
        "reading the weights of a model",
        Needs(models=2),
    ),
    "speculate": Scenario(
        "an answer that repeats its prompt", speculate, _SPEED, "the share of guesses that are right"
    ),
    "phases": Scenario(
        "a long prompt, and the same one again after decode",
        phases,
        {
            "first": Figure("time to first token, second time", "s"),
            "prefill": Figure("time to first token, first time", "s"),
            **{figure: Figure(f"MLX's peak {when}", "B") for figure, (_, when) in _PEAKS.items()},
            "peak": PEAK,
            "growth": GROWTH,
        },
        _COMPUTED,
        no_higher=("second_peak", "first_peak"),
    ),
}
