"""Callbacks: what a study sees of every round. They look at a run and change nothing in it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedbandit.core.errors import ConfigError
from fedbandit.events import Events
from fedbandit.federated.round import Phase
from fedbandit.federated.state import State


@dataclass(frozen=True)
class RoundEvents:
    """The events of the round after a state, all clients together, made when they are asked for: `events()`.

    Chunks of clients are computed wherever the engine is, and their events are not kept. But a draw is a function of
    seed, round, client and position, so acting again with the models of the round gives the very same events. That
    costs about as much as acting did, once per round however often it is asked.
    """

    phase: Phase
    state: State  # before the round

    def __call__(self) -> Events:
        return self._events

    @cached_property
    def _events(self) -> Events:
        number = self.state.round + 1
        work = self.phase.work
        return work.act(self.phase.cohorts.draw(number), work.broadcast(self.state, self.phase.scenario.stage(number)))


Callback = Callable[[State, RoundEvents, dict[str, Any]], Any]
"""Called after a round with the state behind it, its events (computed when called) and a copy of its metrics."""


def checked(callbacks: Iterable[Any]) -> tuple[Callback, ...]:
    """The callbacks as functions: each is one, or has a method `on_round`."""
    found = []
    for given in callbacks:
        found.append(getattr(given, "on_round", given))
        if not callable(found[-1]):
            raise ConfigError(f"callbacks: {given!r} is neither a function nor an object with `on_round`")
    return tuple(found)
