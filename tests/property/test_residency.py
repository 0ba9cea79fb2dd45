"""Residency under any order of events: the budget is kept, nobody in use is evicted, and everybody who waits is answered."""

import math
from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from multi_model.residency import Command, Grant, Limits, Load, Model, ModelState, Refuse, Residency, Unload

NAMES = ("a", "b", "c", "d")
PATIENCE = 1.0


class ResidencyMachine(RuleBasedStateMachine):
    """Carries out commands in any order, some of them never before the end."""

    @initialize(
        budget=st.integers(8, 30),
        max_models=st.none() | st.integers(1, 3),
        sizes=st.lists(st.integers(1, 16), min_size=4, max_size=4),
        pinned=st.sets(st.sampled_from(NAMES), max_size=1),
        ttl=st.sampled_from((math.inf, 3.0)),
    )
    def begin(self, budget: int, max_models: int | None, sizes: list[int], pinned: set[str], ttl: float) -> None:
        self.residency = Residency(Limits(budget, max_models, patience=PATIENCE), overhead=2)
        for name, size in zip(NAMES, sizes, strict=True):
            self.residency.add(Model(name, size, pinned=name in pinned, ttl=ttl))
        self.now = 0.0
        self.next_ticket = 0
        self.open: dict[int, str] = {}  # tickets that wait
        self.leases: list[str] = []
        self.loading: list[str] = []
        self.unloading: list[str] = []
        self.asked_to_go: set[str] = set()
        self.overgrown = self.repinned = False

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Load(model):
                    assert model not in self.loading
                    assert self.residency.charged <= self.residency.limits.budget or self.overgrown
                    self.loading.append(model)
                case Unload(model):
                    found = self.residency.models[model]
                    assert not found.in_use
                    assert not found.pinned or model in self.asked_to_go or self.overgrown
                    assert model not in self.unloading
                    self.unloading.append(model)
                case Grant(ticket, model):
                    assert self.open.pop(ticket) == model
                    assert self.residency.models[model].state is ModelState.READY
                    self.leases.append(model)
                case Refuse(ticket, _):
                    self.open.pop(ticket)

    @rule(name=st.sampled_from(NAMES))
    def request(self, name: str) -> None:
        self.next_ticket += 1
        self.open[self.next_ticket] = name
        self.carry_out(self.residency.requested(self.next_ticket, name, self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[ticket]
        self.carry_out(self.residency.withdrawn(ticket, self.now))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.carry_out(self.residency.released(name, self.now))

    @precondition(lambda self: self.loading)
    @rule(growth=st.integers(-2, 2), fails=st.booleans())
    def load_ends(self, growth: int, fails: bool) -> None:
        name = self.loading.pop(0)
        if fails:
            self.carry_out(self.residency.failed(name, "it broke", self.now))
            return
        charge = max(1, self.residency.models[name].charge + growth)
        self.overgrown = self.overgrown or growth > 0
        self.carry_out(self.residency.loaded(name, charge, self.now))

    @precondition(lambda self: self.unloading)
    @rule()
    def unload_ends(self) -> None:
        name = self.unloading.pop(0)
        self.asked_to_go.discard(name)
        self.carry_out(self.residency.unloaded(name, self.now))

    @rule(name=st.sampled_from(NAMES))
    def dies(self, name: str) -> None:
        if self.residency.models[name].state is ModelState.READY:
            self.unloading.append(name)
            self.carry_out(self.residency.died(name, self.now))

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        self.asked_to_go.add(name)
        self.carry_out(self.residency.unload(name, self.now))

    @rule(name=st.sampled_from(NAMES), pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        self.repinned = True
        self.carry_out(self.residency.pin(name, pinned, self.now))

    @rule(seconds=st.sampled_from((0.5, 2.0, 10.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.residency.ticked(self.now))

    @invariant()
    def books_are_right(self) -> None:
        models = self.residency.models.values()
        in_use = Counter(self.leases)
        assert {model.name: model.in_use for model in models} == {name: in_use[name] for name in NAMES}
        assert {model.name for model in models if model.state is ModelState.LOADING} == set(self.loading)
        assert {model.name for model in models if model.state is ModelState.UNLOADING} == set(self.unloading)
        assert all(model.resident == bool(model.charge) for model in models)
        limits = self.residency.limits
        assert self.repinned or limits.max_models is None or self.residency.resident_count <= limits.max_models
        assert self.overgrown or self.residency.charged <= limits.budget

    def teardown(self) -> None:
        """When all that runs ends, everybody who waits is answered, in a bounded number of rounds."""
        if not hasattr(self, "residency"):
            return
        for _ in range(100):
            if not (self.open or self.loading or self.unloading or self.leases):
                return
            while self.loading:
                name = self.loading.pop(0)
                self.carry_out(self.residency.loaded(name, self.residency.models[name].charge, self.now))
            while self.unloading:
                self.unload_ends()
            while self.leases:
                self.carry_out(self.residency.released(self.leases.pop(), self.now))
            tick = self.residency.next_tick(self.now)
            self.now = tick if tick < math.inf else self.now
            self.carry_out(self.residency.ticked(self.now))
        raise AssertionError(f"still waiting: {self.open}")


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
