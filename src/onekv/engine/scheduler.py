"""Who is next: the requests that are there, in which state each is, and what a step should do for whom.

Pure decisions: nothing here knows the model, the memory, or the time but for when a request arrived. `move` is the one
place where a request changes its state:

    new -> waiting -> loading -> prefilling -> running -> finished
              |  ^________/          ^                      ^
              |  `-> looking         |                      |  (from every state)
              `______/  `____________/

    waiting     first come, first served: where there is no room for one, those after it wait, too. Only who follows
                another is passed: a prompt that is being stored is about to give it most of its own (`leader`)
    looking     the next one, while a colder tier has not answered what it has of the prompt
    loading     what a colder tier has is being read
    prefilling  its prompt is stored, a chunk at a time, several prompts in turn or together
    running     it gets a token in every step

Who gets a chunk: the prompt that is closest to its first token, or whose follower is. Of every `TURNS` chunks one goes
to the oldest prompt, whatever comes. So a short prompt that meets a long one has its first token when the chunk in
flight and its own are done, and one chunk later where the oldest prompt has been passed by TURNS - 1 others and is
next. A prompt with c chunks, with w chunks in older prompts before it, is stored after TURNS * (c + w) chunks at most.
Chunks of other prompts may be stored in one pass with it (chunks.py): that takes no more than a chunk of full size and
nobody's turn, and counts as one chunk in all of this.
"""

from collections import deque
from collections.abc import Iterator

from .request import Request, RequestState

# Of so many chunks one goes to the oldest prompt.
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
        # Counts what may make room; and who found none, with the count then: it is not tried in every step.
        self._changes = 0
        self._refused: tuple[Request, int] | None = None

    def __iter__(self) -> Iterator[Request]:
        """All that have not ended."""
        return iter([*self.waiting, *self.loading, *self.prefilling, *self.running])

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.loading or self.prefilling or self.running)

    def add(self, request: Request) -> None:
        request.state = "waiting"
        self.waiting.append(request)

    def move(self, request: Request, state: RequestState) -> None:
        """The one place where a request changes its state."""
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
        """The request to start with now, if there is one that is worth trying."""
        if len(self.loading) + len(self.prefilling) + len(self.running) >= self._max_batch:
            return None
        for request in self.waiting:
            if self._refused == (request, self._changes):
                return None
            if request.state == "looking" or not self._follows(request):
                return request
        return None

    def refused(self, request: Request) -> None:
        """There is no room for it: it is not tried again before something has changed."""
        self._refused = (request, self._changes)

    def _follows(self, request: Request) -> bool:
        """Whether it had better wait for what another stores."""
        if request.leader is None or not _leads(*request.leader):
            request.leader = self._leader(request) if self._shares and not request.scored else None
        return request.leader is not None

    def _leader(self, request: Request) -> tuple[Request, int] | None:
        """Whose prompt, up to which length, gives it most of its own."""
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
        """The other prompts, in the order in which their chunks may join its own."""
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
        """Whether there is anything to do but to look for what is cached."""
        return bool(self.loading or self.prefilling or self.running)


def _leads(leader: Request, common: int) -> bool:
    """Whether it has yet to store some of what it has in common with another."""
    return leader.state == "prefilling" and leader.stored < common


def _common(first: list[int], second: list[int]) -> int:
    """Tokens that both begin with."""
    length, step = min(len(first), len(second)), 1024
    start = 0
    while start < length and first[start : start + step] == second[start : start + step]:
        start += step
    pairs = zip(first[start : start + step], second[start : start + step], strict=False)
    return min(length, start + next((i for i, (a, b) in enumerate(pairs) if a != b), step))
