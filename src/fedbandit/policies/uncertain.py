"""Exploration rules that ask how sure the model is: by its widths, or by the heads of an ensemble."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedbandit.core.parts import require
from fedbandit.core.prediction import Drawn, Prediction
from fedbandit.policies.rules import Around, Greedy, ask, checked, fused_form

_REACH = 5.0  # standard deviations at which a Gaussian ends; 3e-7 lies beyond
_PANEL = 2.0  # standard deviations of the narrowest Gaussian that one panel of quadrature spans
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(5)


@dataclass(frozen=True)
class Ucb:
    """Greedy on mean + alpha * width: optimism in the face of uncertainty (LinUCB: Li et al.,
    2010).

    Needs a model with `width` (`algorithm.name = "statistics"` or `"diag-newton"`) or with `heads`,
    whose standard deviation is then the width. One action has probability 1; set `policy.floor`
    where the logs are to serve evaluation.

    Examples:
        >>> import numpy as np
        >>> from fedbandit.policies import Prediction
        >>> told = Prediction(np.array([[0.5, 0.4]]), width=np.array([[0.1, 0.3]]))
        >>> Ucb(alpha=1.0).probabilities(told)
        array([[0., 1.]])
    """

    alpha: float = 1.0

    epsilon: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        require(self, alpha="at least 0")

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        return Greedy().probabilities(raised(prediction, self.alpha), available)


@dataclass(frozen=True)
class Optimistic(Around):
    """Another rule over mean + alpha * width in place of the mean: softmax or FALCON with a bonus.

    Every rule of a configuration that has no `alpha` of its own takes one, and becomes this.
    """

    alpha: float

    def __post_init__(self) -> None:
        require(self, alpha="at least 0")

    def probabilities(
        self,
        prediction: Prediction,
        available: np.ndarray | None = None,
        contexts: object = None,
    ) -> np.ndarray:
        return ask(self.rule, raised(prediction, self.alpha), available, contexts)

    def sample_fused(self, prediction: Prediction, uniforms: np.ndarray) -> Drawn:
        fused = fused_form(self.rule)
        return None if fused is None else fused(raised(prediction, self.alpha), uniforms)


@dataclass(frozen=True)
class Thompson:
    """Thompson sampling: an action as often as it is the best one (Thompson, 1933; Agrawal and
    Goyal, 2013).

    A model with `heads` votes: they are draws of its parameters, and an action's probability is the
    share of heads that rate it highest. A model with `width` has independent Gaussian scores; the
    probability that an action's is the largest is computed by quadrature, to 1e-4, and actions are
    drawn from what was computed, so that logged propensities are exact. `scale` multiplies the
    widths: above 1 explores more.

    Examples:
        >>> import numpy as np
        >>> from fedbandit.policies import Prediction
        >>> told = Prediction(np.array([[0.5, 0.4]]), width=np.array([[0.1, 0.3]]))
        >>> Thompson().probabilities(told).round(3)
        array([[0.624, 0.376]])
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        require(self, scale="positive")

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        if prediction.heads is not None:
            return votes(prediction, available)
        scores, available = checked(prediction, available)
        widths = self.scale * np.asarray(width_of(prediction), np.float64)
        flat = scores.reshape(-1, scores.shape[-1]).astype(np.float64)
        allowed = None if available is None else available.reshape(flat.shape)
        found = _chances_to_be_best(flat, widths.reshape(flat.shape), allowed)
        return found.reshape(scores.shape).astype(scores.dtype)


@dataclass(frozen=True)
class Bagging:
    """Votes of an ensemble's heads: an action's probability is the share that rates it highest.

    Heads that each saw another bootstrap of the events stand for a posterior (Eckles and Kaptein,
    2014; `--bag` in Vowpal Wabbit). Needs `model.heads`; set `policy.floor` where the logs are to
    serve evaluation, because an action without a vote has probability 0.

    Examples:
        >>> import numpy as np
        >>> from fedbandit.policies import Prediction
        >>> heads = np.array([[[0.1, 0.2], [0.3, 0.1], [0.0, 0.4]]])  # three heads, two actions
        >>> Bagging().probabilities(Prediction(heads.mean(axis=1), heads=heads)).round(3)
        array([[0.333, 0.667]])
    """

    def probabilities(
        self, prediction: Prediction, available: np.ndarray | None = None
    ) -> np.ndarray:
        return votes(prediction, available)


def width_of(prediction: Prediction) -> np.ndarray:
    """One standard deviation of each score, [..., K]: the model's width, or the spread of its
    heads.
    """
    if prediction.width is not None:
        return prediction.width
    if prediction.heads is not None:
        return np.asarray(prediction.heads.std(axis=-2))
    raise ValueError(
        "the model does not say how sure it is; set algorithm.name to statistics or diag-newton,"
        " or model.heads"
    )


def raised(prediction: Prediction, alpha: float) -> Prediction:
    """The prediction with mean + alpha * width for a mean."""
    width = np.asarray(width_of(prediction), prediction.mean.dtype)
    return replace(prediction, mean=prediction.mean + prediction.mean.dtype.type(alpha) * width)


def votes(prediction: Prediction, available: np.ndarray | None) -> np.ndarray:
    """The share of heads [..., H, K] that rate each action highest: [..., K]."""
    scores, available = checked(prediction, available)
    if prediction.heads is None:
        raise ValueError("the model has no heads to vote; set model.heads")
    allowed = None if available is None else available[..., None, :]
    best = Greedy().probabilities(Prediction(prediction.heads), allowed)
    return np.asarray(best.mean(axis=-2), scores.dtype)


def _chances_to_be_best(
    means: np.ndarray, widths: np.ndarray, available: np.ndarray | None
) -> np.ndarray:
    """The probability [n, K] that each of independent Gaussians is the largest.

    It is the integral of f_a(x) times the product of F_b(x) over all other b. Panels of Gauss and
    Legendre go from where the product becomes noticeable to where it is 1; each is as long as the
    narrowest Gaussian that has not ended before it allows, so that any mixture of widths is
    resolved.
    """
    # No width is so small that numbers of this size could not tell a panel's ends apart.
    least = 1e-12 * np.abs(means).max(axis=1, keepdims=True) + 1e-100
    widths = np.maximum(widths, np.maximum(1e-7 * widths.max(axis=1, keepdims=True), least))
    widest = widths.max(axis=1, keepdims=True)
    if available is not None:  # far below all others, and never in the way
        top = np.where(available, means, -np.inf).max(axis=1, keepdims=True)
        means = np.where(available, means, top - 100 * widest)
    ends = means + _REACH * widths
    left = (means - _REACH * widths).max(axis=1)
    found, last = np.zeros_like(means), ends.max(axis=1)
    rows = np.arange(len(means))
    while len(rows):
        at, own, span = left[rows], means[rows, None], widths[rows, None]
        narrowest = np.where(ends[rows] > at[:, None], widths[rows], np.inf).min(axis=1)
        right = np.minimum(at + _PANEL * narrowest, last[rows])
        half = (right - at) / 2
        z = ((at + half)[:, None] + half[:, None] * _NODES)[..., None]  # [n, nodes, 1]
        z = np.clip((z - own) / span, -37, 37)  # beyond, a normal density is 0
        below = _normal_below(z)
        # The product over all others: 0 in one factor must not become 0/0.
        product = np.maximum(below, 1e-300).prod(axis=2, keepdims=True) / np.maximum(below, 1e-300)
        density = np.exp(-(z**2) / 2) / (np.sqrt(2 * np.pi) * span)
        found[rows] += half[:, None] * np.einsum("j,njk->nk", _WEIGHTS, density * product)
        left[rows] = right
        rows = rows[right < last[rows]]
    if available is not None:
        found *= available
    return np.asarray(found / found.sum(axis=1, keepdims=True))


def _normal_below(z: np.ndarray) -> np.ndarray:
    """The standard normal distribution function, to 1e-7 (Abramowitz and Stegun 7.1.26)."""
    x = np.abs(z) / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    series = 1.061405429
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = series * t + coefficient
    tail = series * t * np.exp(-(x**2)) / 2
    return np.asarray(np.where(z < 0, tail, 1 - tail))
