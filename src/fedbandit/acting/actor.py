"""One deployed version at work: predict, explore, draw. Everything that acts or predicts goes
through it.

Simulator, devices, gate, off-policy evaluation and studies differ only in where contexts and
uniform numbers come from.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbandit.acting.predictors import Predictor
from fedbandit.core.contexts import Contexts
from fedbandit.core.loops import core_kernels, draw_actions
from fedbandit.core.prediction import Prediction
from fedbandit.policies import (
    Policy,
    ask,
    check_probabilities,
    fused_form,
    is_built_in,
    takes_contexts,
)


@dataclass(frozen=True)
class Chosen:
    """Actions int64 [n], the probabilities [n] they were drawn with, and the prediction behind
    them.
    """

    prediction: Prediction
    actions: np.ndarray
    propensities: np.ndarray

    def like(self, contexts: Contexts) -> "Chosen":
        """Room for choices of the same kind about these decisions, all zero."""
        n, shown = len(contexts), contexts.candidates
        prediction = self.prediction.like(n, None if shown is None else shown.bounds)
        return Chosen(prediction, np.zeros(n, np.int64), np.zeros(n, self.propensities.dtype))

    def put(self, rows: np.ndarray, other: "Chosen") -> None:
        """Overwrite some rows with those of another choice of the same kind."""
        self.prediction.put(rows, other.prediction)
        self.actions[rows], self.propensities[rows] = other.actions, other.propensities


@dataclass(frozen=True)
class Personal:
    """Weights of some clients' own, and which of n decisions are made with them.

    A client that has adapted the deployed model acts with its own vector; all others act with the
    deployed one.
    """

    vectors: Sequence[np.ndarray]  # flat [P] each, as long as the deployed weights
    owner: np.ndarray  # int64 [n]: the vector that a decision is made with; -1: the deployed one


@dataclass(frozen=True)
class Actor:
    """A model's predictor, its weights, and the rule that ships with them.

    Examples:
        >>> from fedbandit.models import DataSpec, Layout, build_model
        >>> from fedbandit.acting import make_predictor
        >>> from fedbandit.policies import Softmax
        >>> model = build_model("linear", DataSpec("dense", (3,), 2))
        >>> layout = Layout.of(model.init(0))
        >>> actor = Actor(make_predictor(model, layout, light=True), np.zeros(8), Softmax(0.1))
        >>> chosen = actor.choose(Contexts(np.ones((4, 3))), uniforms=np.array([0.1, 0.4, 0.6, 0.9]))
        >>> chosen.actions, chosen.propensities
        (array([0, 0, 1, 1]), array([0.5, 0.5, 0.5, 0.5]))
    """

    predictor: Predictor
    weights: np.ndarray  # flat [P]
    rule: Policy
    compiles: bool = True  # a device never does

    def predict(self, contexts: Contexts, personal: Personal | None = None) -> Prediction:
        """The model's prediction for every action of every decision, each with its own weights."""
        if personal is None or not len(contexts):
            return self.predictor.predict(self.weights, contexts)
        shown, whole = contexts.candidates, None
        for owner in np.unique(personal.owner):
            rows = np.flatnonzero(personal.owner == owner)
            weights = self.weights if owner < 0 else personal.vectors[owner]
            found = self.predictor.predict(weights, contexts.take(rows))
            if whole is None:
                whole = found.like(len(contexts), None if shown is None else shown.bounds)
            whole.put(rows, found)
        assert whole is not None
        return whole

    def choose(
        self,
        contexts: Contexts,
        uniforms: np.ndarray,
        available: np.ndarray | None = None,
        personal: Personal | None = None,
    ) -> Chosen:
        """Draw an action for each decision by its uniform number in [0, 1).

        `available` says which actions exist: bool [K], [n, K], over candidates [m]; None: all.
        """
        prediction = self.predict(contexts, personal)
        with _finite(prediction):
            if prediction.bounds is None:
                return Chosen(prediction, *self._drawn(prediction, contexts, uniforms, available))
            actions = np.zeros(len(contexts), np.int64)
            propensities = np.zeros(len(contexts), prediction.mean.dtype)
            for rows, _, block, allowed, own in _blocks(self.rule, prediction, available, contexts):
                drawn = self._drawn(block, own, uniforms[rows], allowed)
                actions[rows], propensities[rows] = drawn
            return Chosen(prediction, actions, propensities)

    def _drawn(
        self,
        prediction: Prediction,
        contexts: Contexts | None,
        uniforms: np.ndarray,
        available: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Actions and propensities for decisions with equally many actions."""
        compiled = self.compiles and core_kernels.in_use
        fused = fused_form(self.rule) if available is None and compiled else None
        drawn = None if fused is None else fused(prediction, uniforms)
        if drawn is None:
            probabilities = explore(self.rule, prediction, available, contexts)
            draw = draw_actions if self.compiles else draw_actions.numpy
            drawn = draw(probabilities, uniforms)
        actions, propensities = drawn
        return actions, propensities

    def distribution(
        self, contexts: Contexts, available: np.ndarray | None = None
    ) -> tuple[Prediction, np.ndarray]:
        """The prediction, and in float64 the probability of every action: [n, K] or [m]."""
        prediction = self.predict(contexts)
        with _finite(prediction):
            exact = prediction.astype(np.float64)
            return prediction, explore(self.rule, exact, available, contexts)


class NotFinite(ValueError):
    """Scores that are not finite; `row` is the first decision that has one."""

    def __init__(self, row: int) -> None:
        super().__init__("scores must be finite")
        self.row = row


@contextmanager
def _finite(prediction: Prediction) -> Iterator[None]:
    """Weights can be finite and still give scores that are not: then `NotFinite` says where."""
    try:
        yield
    except ValueError:
        bad = np.flatnonzero(~prediction.finite())
        if len(bad):
            raise NotFinite(int(bad[0])) from None
        raise


class WrongProbabilities(ValueError):
    """A rule of the user's gave something that is not a distribution over the available actions."""


def explore(
    rule: Policy,
    prediction: Prediction,
    available: np.ndarray | None = None,
    contexts: Contexts | None = None,
) -> np.ndarray:
    """The rule's probabilities [n, K], over candidates [m]; a rule whose `probabilities` takes
    `contexts` is given them.

    What comes from outside is checked every time: `WrongProbabilities` says what is wrong.
    """
    if prediction.bounds is not None:
        probabilities = np.zeros_like(prediction.mean)
        for _, at, block, allowed, own in _blocks(rule, prediction, available, contexts):
            probabilities[at] = explore(rule, block, allowed, own)
        return probabilities
    if is_built_in(rule):
        return ask(rule, prediction, available, contexts)
    kind, before = type(rule), _global_draws()
    probabilities = ask(rule, prediction, available, contexts)
    try:
        check_probabilities(probabilities, prediction, available)
    except ValueError as error:
        raise WrongProbabilities(f"{kind.__name__} gave {error}") from None
    if _global_draws() != before:
        raise WrongProbabilities(
            f"{kind.__module__}:{kind.__name__} draws from np.random, so that no run could be"
            " repeated; use np.random.default_rng with a seed"
        )
    return probabilities


def _global_draws() -> object:
    """Where numpy's global generator stands."""
    state: Any = np.random.get_state()  # noqa: NPY002 - to see whether a user's rule uses it
    return state[2], state[1][0]


def _blocks(
    rule: Policy,
    prediction: Prediction,
    available: np.ndarray | None,
    contexts: Contexts | None,
) -> Iterator[tuple[np.ndarray, np.ndarray, Prediction, np.ndarray | None, Contexts | None]]:
    """Blocks of a prediction over candidates, with what is available, and contexts if the rule
    asks.
    """
    wanted = contexts if takes_contexts(type(rule)) else None
    for rows, at, block in prediction.blocks():
        allowed = None if available is None else available[at]
        yield rows, at, block, allowed, None if wanted is None else wanted.take(rows)
