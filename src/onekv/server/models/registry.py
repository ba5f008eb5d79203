"""`Models`: decides which of several models are loaded, within one budget. The package's docstring has the states.

Requests `ask` for a model and `leave` it, in any thread; onekv-models acts on that (`_turn`). The lock is held only for
decisions: never while something is loaded, stopped or waited for.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import MemoryBudgetError, OneKVError, StuckError
from ...models.freed import freed
from ...prefix.events import Listener
from ...units import format_size
from ..backend import Backend
from ..errors import NotFoundError, for_client
from ..metrics import Metrics
from .freeing import Parts, Taken
from .loading import Loader
from .model import PRESENT, Model, Place, limit_of, needs
from .planning import budget, plan_model
from .progress import Loads
from .refusals import check_fits, shutting_down, too_many
from .spec import ModelSpec

log = logging.getLogger("onekv.models")
# How often it is looked whether the thread has ended.
LOOK_S = 0.05


class Models:
    def __init__(
        self,
        specs: list[ModelSpec],
        memory: str | int | None,
        common: Mapping[str, Any],
        loaded: Callable[[Backend], None] = lambda backend: None,
        listeners: Sequence[Listener | None] = (),
    ) -> None:
        """`memory` is for all of them together; without it, what is free now. `common` are arguments of every
        `Backend`, `max_waiting` and `max_wait` among them. `loaded` is told each one that is loaded; `listeners`, one
        for each model if there are any, hear which blocks are cached.
        """
        self._loaded = loaded
        self.max_waiting, self.max_wait = int(common["max_waiting"]), float(common["max_wait"])
        self.memory = budget(memory)
        hygiene = common["hygiene"]
        hearing = listeners or [None] * len(specs)
        self.models = [
            Model(spec, Metrics(hygiene.names), listener) for spec, listener in zip(specs, hearing, strict=True)
        ]
        self._loader = Loader(specs, common)
        self._names = {name: model for model in self.models for name in model.names}
        self._any = self.models[0].spec.served.any_model
        # Guards everything below, and what the models say of themselves.
        self._changed = threading.Condition()
        # Requests that wait for a model, in the order they came.
        self._queue: list[Place] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="onekv-models", daemon=True)
        # Whether the plans are known, and what is loaded at the start is.
        self.ready = False
        self.started = time.monotonic()

    # From any thread

    @property
    def first(self) -> Model:
        """The one that is meant where a request names none."""
        return self.models[0]

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def loads(self) -> Loads:
        return self._loader.loads

    @property
    def counted(self) -> int:
        """Bytes of `memory` that are taken now."""
        with self._changed:
            return self._counted()

    def backends(self) -> dict[str, Backend]:
        """Those of the loaded models, by name; a call to one may find that it has ended meanwhile."""
        with self._changed:
            return {model.name: model.backend for model in self.models if model.backend is not None}

    def start(self) -> None:
        """Plan all models, load the first and what is pinned; blocks until that is done. Raises what it meets."""
        tokenizers: dict[Any, Any] = {}
        for model in self.models:
            weights = model.spec.weights
            model.planned = plan_model(model.spec, self.memory, tokenizers.get(weights))
            tokenizers[weights] = model.planned.tokenizer
        at_start = [model for model in self.models if model.pinned or model is self.first]
        for model in self.models:
            try:
                self._check_fits(model)
            except MemoryBudgetError as error:
                if model in at_start:
                    raise
                log.warning("%s; requests for it will be rejected", error)
        for model in at_start:
            self._begin_load(model)
            self._has_loaded(model, self._loader.load(model))
        self._thread.start()
        self.ready = True

    def knows(self, name: str | None) -> bool:
        return name in self._names

    def find(self, name: str | None) -> Model:
        """The model that `name` means; None is the first. Raises NotFoundError."""
        if name in (None, "default"):
            return self.first
        found = self._names.get(name or "")
        if found is None and not self._any:
            known = ", ".join(map(repr, self._names))
            raise NotFoundError(
                f"there is no model {name!r}; this server has {known} (--alias adds names, --any-model on accepts any)"
            )
        return found or self.first

    def ask(self, model: Model, request: str | None = None) -> Place:
        """A place for a request to `model`, which has to `leave` it; `request` is what its client knows it by.

        Raises MemoryBudgetError if the model can never be loaded, and OverloadedError if too many wait.
        """
        place = Place(model, request)
        with self._changed:
            if self._stopping:
                raise shutting_down()
            backend = model.backend
            if model.state == "loaded" and backend is not None and not backend.thread.alive:
                # It could not go on; what is left of it makes room for another try.
                model.move("unloading")
                self._changed.notify_all()
            if model.state not in PRESENT:
                self._check_fits(model)
            if model.state == "loaded":
                self._grant(place)
            elif len(self._queue) >= self.max_waiting:
                raise too_many(model, len(self._queue))
            else:
                self._queue.append(place)
            self._changed.notify_all()
        return place

    def leave(self, place: Place) -> None:
        """The request is answered, or does not want to wait any more."""
        with self._changed:
            if place in self._queue:
                self._queue.remove(place)
            elif place.came.exception() is None:
                place.model.uses -= 1
                place.model.used = time.monotonic()
            self._changed.notify_all()

    def waiting(self, model: Model) -> int:
        """Requests that wait until it is loaded."""
        with self._changed:
            return sum(place.model is model for place in self._queue)

    def queue(self) -> list[Place]:
        """Requests that wait for a model, the next one first."""
        with self._changed:
            return list(self._queue)

    def pin(self, model: Model) -> None:
        """Never unload it for another one; this does not load it. Requests for models that no longer fit are rejected.

        Raises MemoryBudgetError if it cannot be loaded beside what else is pinned.
        """
        with self._changed:
            self._check_fits(model)
            model.pin()
            for other in {place.model for place in self._queue if place.model.state not in PRESENT}:
                try:
                    self._check_fits(other)
                except MemoryBudgetError as error:
                    self._settle(other, error)
            self._changed.notify_all()

    def unpin(self, model: Model) -> None:
        """It may be unloaded again, as it was configured."""
        with self._changed:
            model.unpin()
            self._changed.notify_all()

    def unload(self, model: Model) -> None:
        """Unload it when those that hold it are answered, and not before it is loaded; returns when that is done."""
        with self._changed:
            self._changed.wait_for(lambda: model.state != "loading" or self._stopping)
            if model.state == "loaded":
                model.move("unloading")
                self._changed.notify_all()
            self._changed.wait_for(lambda: model.state != "unloading" or self._stopping)

    def stop(self, grace: float, step_limit: float = math.inf) -> None:
        """As `Backend.stop`, of all that are loaded, at once; one that is being loaded is left to the process's end.

        Raises StuckError if one of them could not be stopped.
        """
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            queue, self._queue = self._queue, []
            for place in queue:
                place.came.set_exception(shutting_down())
            backends = [model.backend for model in self.models if model.backend is not None]
            self._changed.notify_all()
        stuck: list[StuckError] = []

        def end(backend: Backend) -> None:
            try:
                backend.stop(grace, step_limit)
            except StuckError as error:
                stuck.append(error)

        threads = [threading.Thread(target=end, args=(each,), name="onekv-stopping", daemon=True) for each in backends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # It may be storing what a model had cached.
        while self._thread.is_alive() and not any(model.state == "loading" for model in self.models):
            self._thread.join(LOOK_S)
            stuck += [StuckError(b.thread.complaint(step_limit)) for b in backends if b.thread.stuck(step_limit)]
            if stuck:
                break
        if stuck:
            raise stuck[0]

    # With the lock held

    def _counted(self) -> int:
        held = [model for model in self.models if self._loader.holds(model)]
        return needs([model for model in self.models if model.counted], held)

    def _check_fits(self, model: Model) -> None:
        """Raises MemoryBudgetError if `model` cannot be loaded with what is pinned, whatever else is unloaded."""
        pinned = [other for other in self.models if other.pinned and other is not model]
        check_fits(model, pinned, self.memory)

    def _grant(self, place: Place) -> None:
        model = place.model
        assert model.backend is not None
        model.uses += 1
        model.used = time.monotonic()
        place.came.set_result(model.backend)

    def _settle(self, model: Model, error: OneKVError | None = None) -> None:
        """Those that waited for `model` get it, or the reason why not."""
        for place in [place for place in self._queue if place.model is model]:
            self._queue.remove(place)
            if error is None:
                self._grant(place)
            else:
                place.came.set_exception(error)
        self._changed.notify_all()

    def _next(self) -> Model | None:
        """The model to work on now: one to be unloaded that no request holds, or one that is loading."""
        for model in self.models:
            if model.expired:
                model.move("unloading")
        leaving = [model for model in self.models if model.state == "unloading"]
        for model in leaving:
            if model.uses == 0:
                return model
        wanted = self._wanted()
        if wanted is None:
            return None
        there = [model for model in self.models if model.counted]
        if needs([*there, wanted]) <= self.memory:
            self._begin_load(wanted)
            return wanted
        staying = [model for model in there if model not in leaving]
        for model in self._victims():
            if needs([*staying, wanted]) <= self.memory:
                break
            model.move("unloading")
            staying.remove(model)
            leaving.append(model)
        return next((model for model in leaving if model.uses == 0), None)

    def _wanted(self) -> Model | None:
        """The one to be loaded next."""
        return next((place.model for place in self._queue if place.model.state != "unloading"), None)

    def _staying(self, model: Model | None = None) -> list[Model]:
        """Those whose shared weights stay in memory without `model`: the loaded ones, and the one to be loaded next, so
        that an adapter that does not fit beside its base finds the weights of that.
        """
        wanted = self._wanted()
        return [each for each in self.models if (each.counted or each is wanted) and each is not model]

    def _stale(self) -> bool:
        """Whether shared weights, or freed memory, are held for a model that no request waits for any more."""
        if freed.kept and self._wanted() is None:
            return True
        staying = {model.spec.weights for model in self._staying()}
        return any(self._loader.holds(model) and model.spec.weights not in staying for model in self.models)

    def _begin_load(self, model: Model) -> None:
        self.loads.began()
        model.move("loading")

    def _victims(self) -> list[Model]:
        """Those that may have to go, in that order."""
        loaded = [model for model in self.models if model.state == "loaded" and not model.pinned]
        return sorted(loaded, key=lambda model: (model.uses > 0, model.used))

    def _pause(self) -> float | None:
        """Seconds until one has idled long enough; None if none will."""
        ends = [model.expires for model in self.models if model.state == "loaded" and model.uses == 0]
        soonest = min(ends, default=math.inf)
        return None if soonest == math.inf else max(0.0, soonest - time.monotonic())

    # In the thread that loads and unloads

    def _run(self) -> None:
        while True:
            with self._changed:
                model = None
                while not self._stopping and not self._stale() and (model := self._next()) is None:
                    self._changed.wait(self._pause())
                if self._stopping:
                    return
            if model is None:
                self._give_back()
            elif model.state == "loading":
                self._load(model)
            else:
                self._unload(model)

    def _load(self, model: Model) -> None:
        try:
            self._has_loaded(model, self._loader.load(model))
            return
        except Exception as error:  # noqa: BLE001  those that wait get it; the server continues
            log.error("the model %s could not be loaded: %s", model.name, error)
            told = for_client(error)
        # Its frames have what was loaded so far.
        told.__traceback__ = told.__cause__ = told.__context__ = None
        self._give_back(model)
        with self._changed:
            model.move("failed", str(told))
            self._settle(model, told)

    def _has_loaded(self, model: Model, backend: Backend) -> None:
        size, seconds = format_size(self._alone(model)), time.monotonic() - model.since
        log.info("the model %s is loaded: %s, in %.1f s", model.name, size, seconds)
        self._loaded(backend)
        with self._changed:
            model.backend, model.used = backend, time.monotonic()
            model.move("loaded")
            self._settle(model)
            late = self._stopping
        if late:
            # Nobody else has a reference to it.
            backend.stop(0)

    def _unload(self, model: Model) -> None:
        assert model.backend is not None
        before, size = Taken.now(), format_size(self._alone(model))
        parts = Parts(model.backend) if model.backend.thread.alive else None
        # Nobody holds it: what has not ended was given up by its client.
        model.backend.stop(0)
        with self._changed:
            model.backend = None
        self._give_back(model, parts)
        seconds = time.monotonic() - model.since
        log.info("the model %s is unloaded: %s, in %.1f s; %s", model.name, size, seconds, before.until(Taken.now()))
        with self._changed:
            model.move("unloaded")
            self._changed.notify_all()

    def _give_back(self, model: Model | None = None, parts: Parts | None = None) -> None:
        """Free what no model uses, and what `model` does not share with others; the next load may reuse the memory."""
        with self._changed:
            staying, wanted = self._staying(model), self._wanted()
            others = [other for other in self.models if other.counted and other is not model]
        self._loader.keep(staying, parts, limit_of(self.memory, others) if wanted is not None else None)

    def _alone(self, model: Model) -> int:
        """Bytes that are counted for `model`, and would not be without it."""
        with self._changed:
            held = self._staying(model)
        others = [other for other in held if other.counted]
        return needs([*others, model], held) - needs(others, held)
