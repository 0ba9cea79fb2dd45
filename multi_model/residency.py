"""Which models are resident: pure policy over bytes, times and names. Events in, commands out; whoever carries the commands out
reports back what became of them.

    unloaded --Load--> loading --loaded--> ready --Unload--> unloading --unloaded--> unloaded
                          | failed               died (without Unload)
                          v
                       failed: until its cool-down is over, requests are refused

The rules:
- What is charged never exceeds the budget. A load is charged its estimate before it begins, then what it measures.
- Room is made by unloading idle models, least recently used first; never one that is in use, promised to a request, or pinned;
  and only where that makes room enough.
- The longest waiting request has the first claim on room. A model that is there serves on meanwhile, but where somebody has
  waited for its room for `patience` seconds, its new requests wait too, behind the one who waits.
- A request that no unloading could ever make room for is refused at once.
"""

import enum
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from llm.exceptions import ModelUnavailable


class ModelState(enum.Enum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Load:
    model: str


@dataclass(frozen=True, slots=True)
class Unload:
    model: str


@dataclass(frozen=True, slots=True)
class Grant:
    """The request may use the model, until it is released."""

    ticket: int
    model: str


@dataclass(frozen=True, slots=True)
class Refuse:
    ticket: int
    error: ModelUnavailable


Command = Load | Unload | Grant | Refuse


@dataclass(frozen=True, slots=True)
class Limits:
    budget: int  # bytes
    max_models: int | None = None  # beside those that are pinned
    patience: float = 1.0  # seconds that a request waits for room before others have to
    cool_down: float = 2.0  # seconds after a first failure; doubled by each further one
    longest_cool_down: float = 300.0


@dataclass(slots=True)
class Model:
    """One entry's residency. `charge`: bytes; while loading, the estimate."""

    name: str
    estimate: int
    title: str = ""  # for people; absent: its name
    pinned: bool = False
    ttl: float = math.inf  # seconds without a request
    state: ModelState = ModelState.UNLOADED
    charge: int = 0
    in_use: int = 0
    last_use: float = 0.0
    use_number: int = 0  # orders uses at one and the same time
    failures: int = 0  # in a row
    reason: str = ""  # of the last failure
    retry_at: float = 0.0
    loads: int = 0
    evictions: int = 0
    leaving: bool = False  # no new request is granted: somebody has waited too long for its room
    remove: bool = False  # gone from the catalogue; forgotten as soon as it is unloaded
    unload_asked: bool = False  # by a person; done as soon as nobody uses it

    @property
    def resident(self) -> bool:
        return self.state in {ModelState.LOADING, ModelState.READY, ModelState.UNLOADING}

    @property
    def idle(self) -> bool:
        return self.state is ModelState.READY and self.in_use == 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    ticket: int
    model: str
    since: float


@dataclass(slots=True)
class Residency:
    """Not thread-safe: one task drives it. Each event returns the commands that follow; `now` is in seconds and never falls."""

    limits: Limits
    overhead: int = 0  # bytes that are there whatever is resident
    models: dict[str, Model] = field(default_factory=dict)
    _waiting: list[_Waiting] = field(default_factory=list)
    _uses: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def charged(self) -> int:
        return self.overhead + sum(model.charge for model in self.models.values())

    @property
    def resident_count(self) -> int:
        """Without the pinned ones."""
        return sum(model.resident and not model.pinned for model in self.models.values())

    def loaded_names(self) -> list[str]:
        """Of the models that are ready, least recently used first."""
        ready = [model for model in self.models.values() if model.state is ModelState.READY]
        return [model.name for model in sorted(ready, key=_age)]

    # -- events: the catalogue

    def add(self, model: Model) -> None:
        """Another one of the same name keeps its residency: what is new about it holds from its next load on."""
        known = self.models.setdefault(model.name, model)
        known.pinned, known.ttl, known.title, known.remove = model.pinned, model.ttl, model.title, False
        if not known.resident:
            known.estimate = model.estimate

    def discard(self, name: str, now: float) -> list[Command]:
        """Its requests that wait are refused; it is unloaded as soon as nobody uses it."""
        model = self.models[name]
        model.remove = model.unload_asked = True
        error = ModelUnavailable(model.title or name, "it is no longer in the catalogue")
        commands: list[Command] = [Refuse(ticket, error) for ticket in self._take_waiting(name)]
        return commands + self._gone(model, now)

    # -- events: requests

    def requested(self, ticket: int, name: str, now: float) -> list[Command]:
        model = self.models[name]
        if model.state is ModelState.FAILED:
            if now < model.retry_at:
                return [Refuse(ticket, self._failure(model, now))]
            model.state = ModelState.UNLOADED
        self._waiting.append(_Waiting(ticket, name, now))
        return self._plan(now)

    def withdrawn(self, ticket: int, now: float) -> list[Command]:
        """A request that waits no longer. Does nothing where it doesn't wait."""
        self._waiting = [waiting for waiting in self._waiting if waiting.ticket != ticket]
        return self._plan(now)

    def released(self, name: str, now: float) -> list[Command]:
        model = self.models[name]
        model.in_use -= 1
        self._touch(model, now)
        return self._gone(model, now)

    def pin(self, name: str, pinned: bool, now: float) -> list[Command]:
        self.models[name].pinned = pinned
        return self._plan(now)

    def unload(self, name: str, now: float) -> list[Command]:
        """Asked by a person: as soon as nobody uses it, pinned or not."""
        model = self.models[name]
        if model.state in {ModelState.READY, ModelState.LOADING}:
            model.unload_asked = True
        return self._plan(now)

    # -- events: what became of commands

    def loaded(self, name: str, charge: int, now: float) -> list[Command]:
        """charge: bytes, as measured. Where they don't fit after all, it goes again and waits for room, unless it is pinned."""
        model = self.models[name]
        model.state, model.charge, model.estimate = ModelState.READY, charge, charge
        model.failures, model.reason = 0, ""
        model.loads += 1
        self._touch(model, now)
        missing = self.charged - self.limits.budget
        if missing > 0 and not model.pinned and not self._can_make_room(missing, model):
            return [self._unload(model), *self._plan(now)]
        return self._plan(now)

    def failed(self, name: str, reason: str, now: float) -> list[Command]:
        model = self.models[name]
        model.state, model.charge = ModelState.FAILED, 0
        model.failures += 1
        model.reason = reason
        longest = self.limits.longest_cool_down
        model.retry_at = now + min(self.limits.cool_down * 2 ** min(model.failures - 1, 30), longest)
        model.unload_asked = False
        refused: list[Command] = [Refuse(ticket, self._failure(model, now)) for ticket in self._take_waiting(name)]
        return refused + self._gone(model, now)

    def died(self, name: str, now: float) -> list[Command]:
        """It ended without being told to: nobody gets it any more, and `unloaded` follows when what is left of it has gone."""
        self.models[name].state = ModelState.UNLOADING
        return self._plan(now)

    def unloaded(self, name: str, now: float) -> list[Command]:
        """What it took is free again. Who was using it when it died still releases it."""
        model = self.models[name]
        model.state, model.charge = ModelState.UNLOADED, 0
        model.unload_asked = False
        return self._gone(model, now)

    def measured(self, name: str, charge: int, now: float) -> list[Command]:
        """A model that is there takes another number of bytes now."""
        model = self.models[name]
        if model.state is ModelState.READY:
            model.charge = model.estimate = charge
        return self._plan(now)

    def measured_overhead(self, overhead: int, now: float) -> list[Command]:
        self.overhead = overhead
        return self._plan(now)

    # -- events: time

    def ticked(self, now: float) -> list[Command]:
        return self._plan(now)

    def next_tick(self, now: float) -> float:
        """When time by itself changes something; infinity: never."""
        times = [model.last_use + model.ttl for model in self.models.values() if model.idle and not model.pinned]
        times += [waiting.since + self.limits.patience for waiting in self._waiting]
        return min((time for time in times if time > now), default=math.inf)

    # -- policy

    def _plan(self, now: float) -> list[Command]:
        return [*self._grants(now), *self._unwanted(now), *self._loads(), *self._over_budget()]

    def _grants(self, now: float) -> list[Command]:
        """In the order of arrival. Whose turn it is to get room, and has waited for it too long, has those who are in its way
        asked to leave: they serve the requests that came before, not those that came after."""
        commands: list[Command] = []
        for model in self.models.values():
            model.leaving = False
        claimed = False
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            model = self.models[one.model]
            if model.state is ModelState.READY and not model.leaving and not model.unload_asked:
                model.in_use += 1
                self._touch(model, now)
                commands.append(Grant(one.ticket, one.model))
                continue
            self._waiting.append(one)
            if model.state is ModelState.UNLOADED and not claimed and not self._never_fits(model):
                claimed = True
                if now >= one.since + self.limits.patience:
                    for other in _enough(self._removable(idle_only=False), *self._missing(model)) or []:
                        other.leaving = True
        return commands

    def _unwanted(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for model in self.models.values():
            expired = not model.pinned and now >= model.last_use + model.ttl
            if model.idle and (model.unload_asked or model.leaving or expired):
                commands.append(self._unload(model))
        return commands

    def _loads(self) -> list[Command]:
        """In the order in which the models were first asked for. One that must wait for room keeps later ones from it."""
        commands: list[Command] = []
        for name in dict.fromkeys(waiting.model for waiting in self._waiting):
            model = self.models[name]
            if model.state is not ModelState.UNLOADED:
                continue
            refusal = self._never_fits(model)
            if refusal is not None:
                commands += [Refuse(ticket, refusal) for ticket in self._take_waiting(name)]
            elif self._has_room(model):
                model.state, model.charge = ModelState.LOADING, model.estimate
                commands.append(Load(name))
            else:
                victims = _enough(self._removable(idle_only=True), *self._missing(model)) or []
                commands += [self._unload(victim) for victim in victims]
                break
        return commands

    def _over_budget(self) -> list[Command]:
        """After a model has grown: idle ones go until what is left fits."""
        commands: list[Command] = []
        for model in self._removable(idle_only=True):
            if self.charged - self._going() <= self.limits.budget:
                break
            commands.append(self._unload(model))
        return commands

    def _has_room(self, model: Model) -> bool:
        missing, places = self.charged + model.estimate - self.limits.budget, self._places(model)
        return missing <= 0 and places <= 0

    def _missing(self, model: Model) -> tuple[int, int]:
        """Bytes, and places, that its load would still miss when all that is being unloaded has gone."""
        going = sum(other.state is ModelState.UNLOADING and not other.pinned for other in self.models.values())
        return self.charged - self._going() + model.estimate - self.limits.budget, self._places(model) - going

    def _places(self, model: Model) -> int:
        """How many must go for it to have one."""
        if self.limits.max_models is None or model.pinned:
            return 0
        return self.resident_count + 1 - self.limits.max_models

    def _going(self) -> int:
        """Bytes of what is being unloaded."""
        return sum(model.charge for model in self.models.values() if model.state is ModelState.UNLOADING)

    def _removable(self, *, idle_only: bool) -> list[Model]:
        """Those that may go to make room: idle ones, then those in use, each least recently used first."""
        ready = [model for model in self.models.values() if model.state is ModelState.READY and not model.pinned]
        return sorted(
            (model for model in ready if model.idle or not idle_only), key=lambda model: (not model.idle, *_age(model))
        )

    def _never_fits(self, model: Model) -> ModelUnavailable | None:
        pinned = [other for other in self.models.values() if other.pinned and other.resident]
        free = self.limits.budget - self.overhead - sum(other.charge for other in pinned)
        if model.estimate > free:
            sentence = (
                f"it needs {_mib(model.estimate)}, and the memory budget has {_mib(max(free, 0))} beside what always stays"
            )
            return ModelUnavailable(model.title or model.name, sentence)
        return None

    def _can_make_room(self, missing: int, beside: Model) -> bool:
        others = [model for model in self._removable(idle_only=True) if model is not beside]
        return sum(model.charge for model in others) >= missing

    def _unload(self, model: Model) -> Command:
        model.state = ModelState.UNLOADING
        model.evictions += not model.unload_asked
        return Unload(model.name)

    def _gone(self, model: Model, now: float) -> list[Command]:
        if model.remove and not model.resident and not model.in_use:
            del self.models[model.name]
        return self._plan(now)

    def _failure(self, model: Model, now: float) -> ModelUnavailable:
        return ModelUnavailable(model.title or model.name, model.reason, retry_after=max(1, math.ceil(model.retry_at - now)))

    def _take_waiting(self, name: str) -> list[int]:
        taken = [waiting.ticket for waiting in self._waiting if waiting.model == name]
        self._waiting = [waiting for waiting in self._waiting if waiting.model != name]
        return taken

    def _touch(self, model: Model, now: float) -> None:
        model.last_use, model.use_number = now, next(self._uses)


def _age(model: Model) -> tuple[float, int]:
    return model.last_use, model.use_number


def _enough(models: list[Model], missing: int, too_many: int) -> list[Model] | None:
    """The first of them that together make room; None where all of them don't."""
    chosen: list[Model] = []
    for model in models:
        if missing <= 0 and too_many <= 0:
            break
        chosen.append(model)
        missing, too_many = missing - model.charge, too_many - 1
    return chosen if missing <= 0 and too_many <= 0 else None


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
