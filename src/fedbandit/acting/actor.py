"""One deployed version at work: predict, explore, draw. Everything that acts or predicts goes through it.

Simulator, devices, gate, off-policy evaluation and studies differ only in where contexts and
uniform numbers come from.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from fedbandit.acting.predictors import Predictor
from fedbandit.core.contexts import Contexts
from fedbandit.core.loops import Loops, loops
from fedbandit.core.prediction import Prediction
from fedbandit.policies import Policy, ask, check_probabilities, fused_form, is_built_in
from fedbandit.policies.rules import takes_contexts


@dataclass(frozen=True)
class Chosen:
    """Actions int64 [n], the probabilities [n] they were drawn with, and the prediction behind them."""

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
    loops: Loops = loops  # how actions are drawn; a device never compiles

    def predict(self, contexts: Contexts) -> Prediction:
        """What the model says about every action of every decision."""
        return self.predictor.predict(self.weights, contexts)

    def choose(
        self, contexts: Contexts, uniforms: np.ndarray, available: np.ndarray | None = None
    ) -> Chosen:
        """Draw an action for each decision by its uniform number in [0, 1).

        `available` says which actions exist: bool [K], [n, K], over candidates [m]; None: all.
        """
        prediction = self.predict(contexts)
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
        fused = fused_form(self.rule) if available is None and self.loops.compiling else None
        drawn = None if fused is None else fused(prediction, uniforms)
        if drawn is None:
            probabilities = explore(self.rule, prediction, available, contexts)
            drawn = self.loops.draw_actions(probabilities, uniforms)
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
    """The rule's probabilities [n, K], over candidates [m]; a rule whose `probabilities` takes `contexts` is given them.

    What comes from outside is checked every time: `WrongProbabilities` says what is wrong.
    """
    if prediction.bounds is not None:
        probabilities = np.zeros_like(prediction.mean)
        for _, at, block, allowed, own in _blocks(rule, prediction, available, contexts):
            probabilities[at] = explore(rule, block, allowed, own)
        return probabilities
    probabilities = ask(rule, prediction, available, contexts)
    if not is_built_in(rule):
        try:
            check_probabilities(probabilities, prediction, available)
        except ValueError as error:
            raise WrongProbabilities(f"{type(rule).__name__} gave {error}") from None
    return probabilities


def _blocks(
    rule: Policy,
    prediction: Prediction,
    available: np.ndarray | None,
    contexts: Contexts | None,
) -> Iterator[tuple[np.ndarray, np.ndarray, Prediction, np.ndarray | None, Contexts | None]]:
    """Blocks of a prediction over candidates, with what is available, and contexts if the rule asks."""
    wanted = contexts if takes_contexts(type(rule)) else None
    for rows, at, block in prediction.blocks():
        allowed = None if available is None else available[at]
        yield rows, at, block, allowed, None if wanted is None else wanted.take(rows)
