"""From a model to what predicts and trains with it: a kernel where there is one, autograd
elsewhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from fedbandit.acting import Predictor, make_predictor
from fedbandit.core.errors import ConfigError, needing
from fedbandit.events import Events
from fedbandit.federated.learners.base import (
    AutogradLearner,
    ClientSettings,
    Learner,
    chosen_candidates,
    every_candidate,
)
from fedbandit.federated.learners.linear import (
    DenseLinearLearner,
    SparseHeadsLearner,
    SparseLinearLearner,
)
from fedbandit.models import DataSpec, Freezing, Layout, Model, build_model
from fedbandit.objectives import Objective, Pointwise


def make_learner(
    model: Model,
    layout: Layout,
    objective: Objective,
    settings: ClientSettings,
    device: str = "cpu",
    freezing: Freezing | None = None,
    over_candidates: bool = False,
) -> Learner:
    """The fastest learner there is for this model and objective; all give the same updates up to
    rounding.
    """
    if "bias_precision" in dict(layout.shapes):
        raise ConfigError("model.name: linear-width is deployed, not trained; train linear")
    if model.heads and not isinstance(objective, Pointwise):
        raise ConfigError("objective.name: a model with heads needs one of the built-in objectives")
    if over_candidates and device != "cpu":
        raise ConfigError(f"device: models over candidates are trained on the cpu, not {device}")
    rows_alone = not over_candidates or _one_action(objective)  # else all candidates are scored
    if isinstance(objective, Pointwise) and device == "cpu" and freezing is None and rows_alone:
        if model.kernel == "sparse-linear" and model.heads:
            return SparseHeadsLearner(layout, objective, settings, model.heads)
        if model.kernel == "sparse-linear":
            return SparseLinearLearner(layout, objective, settings)
        if model.kernel == "dense-linear" and not model.heads:
            return DenseLinearLearner(layout, objective, settings)
    with needing(_needing_torch(model, objective, device, freezing)):
        import_module("torch")
    if device != "cpu":
        from fedbandit.federated.learners.vectorised import make_vectorised_learner

        return make_vectorised_learner(model, layout, objective, settings, device, freezing)
    by_hand = freezing is None and model.kernel in ("cnn", "mlp", "sparse-mlp")
    if by_hand and isinstance(objective, Pointwise):
        from fedbandit.federated.learners.networks import ChosenMlpLearner, CnnLearner, DenseLearner

        mlp = DenseLearner if objective.supervised else ChosenMlpLearner
        return (CnnLearner if model.kernel == "cnn" else mlp)(layout, objective, settings)
    return AutogradLearner(model, layout, objective, settings, freezing)


def _needing_torch(
    model: Model, objective: Objective, device: str, freezing: Freezing | None
) -> str:
    """The first thing a linear model could do without."""
    if device != "cpu":
        return f"device: {device}"
    if freezing is not None:
        return "model.freeze"
    if not isinstance(objective, Pointwise):
        return f"objective.name: {type(objective).__name__}"
    if model.kernel == "dense-linear":
        return "model.heads on dense features"
    return f"model.name: {(model.kernel or 'a model of your own').removeprefix('sparse-')}"


def _one_action(objective: Objective) -> bool:
    """Whether the loss looks at the chosen action alone."""
    return isinstance(objective, Pointwise) and not objective.supervised


@dataclass(frozen=True)
class Trainable:
    """A model that fits some data, and how its parameters lie: what predicts and trains is made
    from it.
    """

    model: Model
    layout: Layout
    over_candidates: bool = False
    described: Mapping[str, Any] = field(default_factory=dict)  # its name and parameters

    @classmethod
    def of(cls, described: Mapping[str, Any], data: DataSpec) -> "Trainable":
        """From a model's name and parameters; what simulations, devices, servers and scoring all
        use.
        """
        parameters = {key: value for key, value in described.items() if key != "name"}
        model = build_model(described["name"], data, parameters)
        return cls(model, Layout.of(model.init(0)), data.items is not None, described)

    def initial(self, seed: int, dtype: np.dtype) -> np.ndarray:
        """The model before anything has been learned, flat."""
        return self.layout.flatten(self.model.init(seed), dtype)

    def predictor(self, device: str = "cpu", *, light: bool = False) -> Predictor:
        """The fastest predictor there is for this model; a light one never compiles."""
        return make_predictor(self.model, self.layout, device, light=light)

    def reduction(
        self, objective: Objective, exact_sums: bool = False
    ) -> Callable[[Events], Events] | None:
        """Makes of logged events those that are trained on; None: they are trained on as logged.

        With `exact_sums`, of an algorithm without mini-batches, all candidates become rows, too.
        """
        if not self.over_candidates:
            return None
        if _one_action(objective):
            return partial(chosen_candidates, rows=self.model.rows)
        if not exact_sums or self.model.rows is None:
            return None
        return partial(every_candidate, rows=self.model.rows)

    def learner(
        self,
        objective: Objective,
        settings: ClientSettings,
        device: str = "cpu",
        freezing: Freezing | None = None,
    ) -> Learner:
        """The fastest learner there is for this model and objective; all give the same updates up
        to rounding.
        """
        return make_learner(
            self.model, self.layout, objective, settings, device, freezing, self.over_candidates
        )
