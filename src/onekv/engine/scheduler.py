"""Scheduling: the requests, the state of each, and what a step should do for which of them.

Pure decisions: nothing here knows the model, the memory, or the time except when a request arrived. `move` is the only
place where a request changes its state:

    new -> waiting -> loading -> prefilling -> running -> finished
              |  ^________/          ^                      ^
              |  `-> looking         |                      |  (from every state)
              `______/  `____________/

    waiting     first come, first served: if there is no room for one, those after it wait, too. Only a follower is
                overtaken: a prompt that is being stored (`leader`) is about to provide most of its own
    looking     the next one, while a colder tier is still looking up its prompt
    loading     what a colder tier has is being read
    prefilling  its prompt is being stored, a chunk at a time, several prompts in turn or together
    running     it gets a token in every step

The next chunk goes to the prompt that is closest to its first token, or whose follower is. One of every `TURNS` chunks
goes to the oldest prompt, whatever arrives. So a short prompt that arrives during a long one gets its first token once
the chunk in flight and its own are done, or one chunk later if TURNS - 1 others have overtaken the oldest prompt, whose
turn it then is. A prompt with c chunks, with w chunks in older prompts before it, is stored after at most TURNS * (c +
w) chunks. Chunks of other prompts may be stored in the same pass (chunks.py): that takes no longer than one full-size
chunk, uses up no turn, and counts as one chunk here.
"""

from collections import deque
from collections.abc import Iterator

from .request import Request, RequestState

# One of this many chunks goes to the oldest prompt.
TURNS = 4


class Scheduler:
    def __init__(self, max_batch: int, decode_steps: int, shares: bool = True) -> None:
        """At most `max_batch` requests are admitted; prompts get a chunk after `decode_steps` tokens of the others.

        `shares`: what one has stored another can start from.
        """
        self._max_batch, self._decode_steps, self._shares = max_batch, decode_steps, shares
        # Waiting, the oldest first; one of them may be looking.
        self.waiting: deque[Request] = deque()
        self.loading: list[Request] = []
        # The oldest first.
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        # Tokens decoded since the last chunk of a prompt, and chunks that others got since the oldest prompt did.
        self._since_chunk = 0
        self._passed = 0
        # Counts events that may make room; and which request found none, at which count: not retried in every step.
        self._changes = 0
        self._refused: tuple[Request, int] | None = None

    def __iter__(self) -> Iterator[Request]:
        """All requests that have not ended."""
        return iter([*self.waiting, *self.loading, *self.prefilling, *self.running])

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.loading or self.prefilling or self.running)

    def add(self, request: Request) -> None:
        request.state = "waiting"
        self.waiting.append(request)

    def move(self, request: Request, state: RequestState) -> None:
        """The only place where a request changes its state."""
        places = {"loading": self.loading, "prefilling": self.prefilling, "running": self.running}
        if request.state in places:
            places[request.state].remove(request)
        elif request.state in ("waiting", "looking") and state not in ("waiting", "looking"):
            self.waiting.remove(request)
        if state == "waiting" and request.state == "loading":
            # It was admitted before, so it is the oldest.
            self.waiting.appendleft(request)
        elif state in places:
            places[state].append(request)
            self.prefilling.sort(key=lambda request: request.created)
        request.state, request.leader = state, None
        # Loading, prefilling and ending may all make room.
        self._changes += 1

    # What a step does

    def to_admit(self) -> Request | None:
        """The request to admit now, if there is one worth trying."""
        if len(self.loading) + len(self.prefilling) + len(self.running) >= self._max_batch:
            return None
        for request in self.waiting:
            if self._refused == (request, self._changes):
                return None
            if request.state == "looking" or not self._follows(request):
                return request
        return None

    def refused(self, request: Request) -> None:
        """There is no room for it: it is not retried until something has changed."""
        self._refused = (request, self._changes)

    def _follows(self, request: Request) -> bool:
        """Whether it should wait for what another one stores."""
        if request.leader is None or not _leads(*request.leader):
            request.leader = self._leader(request) if self._shares and not request.scored else None
        return request.leader is not None

    def _leader(self, request: Request) -> tuple[Request, int] | None:
        """The request whose prompt provides most of its own, and up to which length."""
        for other in self.prefilling:
            if other.salt == request.salt and not other.scored:
                common = min(_common(request.prompt, other.prompt), len(other.prompt) - 1)
                if 2 * (common - other.stored) >= len(request.prompt):
                    return other, common
        return None

    def to_prefill(self) -> Request | None:
        """Whose prompt gets a chunk in this step."""
        if not self.prefilling or (self.running and self._since_chunk < self._decode_steps):
            return None
        return self.prefilling[0] if self._passed >= TURNS - 1 else min(self.prefilling, key=self._distance)

    def after(self, request: Request) -> list[Request]:
        """The other prompts, in the order in which their chunks may join its chunk."""
        return sorted((other for other in self.prefilling if other is not request), key=self._distance)

    def _distance(self, request: Request) -> int:
        """Tokens to the first token of a prompt, or of one that waits for it."""
        followers = [other for other in self.waiting if other.leader is not None and other.leader[0] is request]
        return min(len(each.prompt) for each in (request, *followers)) - request.stored

    def chunk_stored(self, *requests: Request) -> None:
        """`requests` got a chunk in one pass; they may be running now."""
        self._since_chunk = 0
        first = min(request.created for request in requests)
        oldest = all(first <= other.created for other in self.prefilling)
        self._passed = 0 if oldest else self._passed + 1

    def tokens_decoded(self) -> None:
        self._since_chunk += 1

    @property
    def computing(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.prefilling or self.running)

    @property
    def in_work(self) -> bool:
        """Whether there is anything to do besides cache lookups."""
        return bool(self.loading or self.prefilling or self.running)


def _leads(leader: Request, common: int) -> bool:
    """Whether it has yet to store some of the prefix it shares with another."""
    return leader.state == "prefilling" and leader.stored < common


def _common(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    length, step = min(len(first), len(second)), 1024
    start = 0
    while start < length and first[start : start + step] == second[start : start + step]:
        start += step
    pairs = zip(first[start : start + step], second[start : start + step], strict=False)
    return min(length, start + next((i for i, (a, b) in enumerate(pairs) if a != b), step))
