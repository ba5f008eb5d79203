"""Who is next: the requests that are there, in which state each is, and what a step should do for whom.

Pure decisions: nothing here knows the model, the memory, or the time but for when a request arrived. `move` is the one
place where a request changes its state:

    new -> waiting -> loading -> prefilling -> running -> finished
              |  ^________/          ^                      ^
              |  `-> looking         |                      |  (from every state)
              `______/  `____________/

    waiting     first come, first served; none overtakes another
    looking     the oldest one, while a colder tier has not answered what it has of the prompt
    loading     what a colder tier has is being read
    prefilling  its prompt is stored, a chunk at a time; the oldest gets the next chunk
    running     it gets a token in every step
"""

from collections import deque
from collections.abc import Iterator

from .request import Request, RequestState


class Scheduler:
    def __init__(self, max_batch: int, decode_steps: int) -> None:
        """At most `max_batch` requests load or run; a prompt gets a chunk after `decode_steps` tokens of the others."""
        self._max_batch, self._decode_steps = max_batch, decode_steps
        # Waiting, the oldest first; that one may be looking.
        self.waiting: deque[Request] = deque()
        self.loading: list[Request] = []
        # The oldest first.
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        # Tokens decoded since the last chunk of a prompt.
        self._since_chunk = 0
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
        request.state = state
        # Loading, prefilling and ending may all make room.
        self._changes += 1

    # What a step does

    def to_admit(self) -> Request | None:
        """The request to start with now, if there is one that is worth trying."""
        if self.prefilling or not self.waiting or len(self.loading) + len(self.running) >= self._max_batch:
            return None
        oldest = self.waiting[0]
        return None if self._refused == (oldest, self._changes) else oldest

    def refused(self, request: Request) -> None:
        """There is no room for it: it is not tried again before something has changed."""
        self._refused = (request, self._changes)

    def to_prefill(self) -> Request | None:
        """Whose prompt gets a chunk in this step."""
        if self.prefilling and (not self.running or self._since_chunk >= self._decode_steps):
            return self.prefilling[0]
        return None

    def chunk_stored(self) -> None:
        self._since_chunk = 0

    def tokens_decoded(self) -> None:
        self._since_chunk += 1

    @property
    def in_work(self) -> bool:
        """Whether there is anything to do but to look for what is cached."""
        return bool(self.loading or self.prefilling or self.running)
