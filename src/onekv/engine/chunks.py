"""Which chunks of prompts are stored in one pass.

The next prompt gets its chunk. If that is small, a GPU would be mostly idle, so chunks of other prompts join it, in
order: each as large as it would be alone, none split, so that no prompt needs more passes. Rows of a pass are padded to
the longest:

    |<-- width -->|
    | a a a a a . |      rows x width       within the workspace of one chunk (`fits_pass`)
    | b b b b b b |      padding (.)        at most a quarter of it
    | c c c c . . |

Prompts whose log probabilities are requested are alone in their pass. Requests that wait for what another one stores
(`Request.leader`) do not take part: they have not been admitted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..memory.plan import Plan
from ..memory.plan.workspace import chunk_tokens, fits_pass, scored_tokens
from ..prefix.lease import Lease
from .request import Request
from .runner import Runner


@dataclass(frozen=True)
class Chunk:
    """The next tokens of a prompt to store; none if all but its last token are stored."""

    request: Request
    lease: Lease
    start: int
    tokens: list[int]
    # Whether the recurrent states are to be kept when it is stored.
    stop: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def last(self) -> bool:
        """Whether this completes the prompt, except for its last token."""
        return self.end == len(self.request.prompt) - 1


def next_chunk(request: Request, plan: Plan, stop_tokens: set[int]) -> Chunk:
    lease, prompt = request.lease, request.prompt
    assert lease is not None
    start, last = lease.sequence.length, len(prompt) - 1
    stops = lease.stops(prompt, stop_tokens) if start < last else []
    most = chunk_tokens(plan.layout, start, plan.prefill_chunk)
    if request.scored:
        most = min(most, scored_tokens(plan.layout))
    end = min(start + most, *stops, last)
    return Chunk(request, lease, start, prompt[start:end], end in stops)


def pass_of(requests: Sequence[Request], plan: Plan, stop_tokens: set[int]) -> list[Chunk]:
    """The chunk of the first request, and those of the others that can be stored in the same pass."""
    joined = [next_chunk(requests[0], plan, stop_tokens)]
    for request in requests[1:]:
        if request.scored or requests[0].scored:
            continue
        other = next_chunk(request, plan, stop_tokens)
        rows = [chunk for chunk in (*joined, other) if chunk.tokens]
        # A request with nothing to store needs no row.
        if not other.tokens or _modest(rows, plan):
            joined.append(other)
    return joined


def store(runner: Runner, rows: list[Chunk], now: Callable[[], float], computed: Callable[[int, float], None]) -> None:
    """Compute and store chunks that have tokens, in one pass; reports their number and the time taken to `computed`."""
    request, sequence = rows[0].request, rows[0].lease.sequence
    if not request.scored:
        begin = now()
        runner.store([row.lease.sequence for row in rows], [row.tokens for row in rows])
        computed(sum(len(row.tokens) for row in rows), now() - begin)
        return
    following, top = request.prompt[rows[0].start + 1 : rows[0].end + 1], request.sampling.logprobs or 0
    request.prompt_logprobs += runner.score(sequence, rows[0].tokens, following, top)


def _modest(rows: list[Chunk], plan: Plan) -> bool:
    counts = [len(row.tokens) for row in rows]
    size = len(counts) * max(counts)
    lengths = [row.start for row in rows]
    fits = fits_pass(plan.layout, plan.blocks, plan.block_size, plan.prefill_chunk, lengths, counts)
    return fits and 4 * (size - sum(counts)) <= size
