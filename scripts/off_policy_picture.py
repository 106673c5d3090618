"""The picture of docs/off-policy.md: estimates with their intervals beside a truth that is known.

    python scripts/off_policy_picture.py docs/images/off-policy.png

The world is that page's: two kinds of weather, three actions, a log that mostly takes `a`, and a
policy that mostly takes `c`. Left: every estimator on one log. Right: one estimator on 100 logs.
"""

import sys
from pathlib import Path

import numpy as np

from fedbandit.ope import BUILT_IN, Estimate, Records, estimate
from fedbandit.results.plots import empty_figure, save_picture

LOGGING, TARGET = np.array([0.6, 0.3, 0.1]), np.array([0.1, 0.2, 0.7])
PAYS = np.array([[0.1, 0.4, 0.6], [0.5, 0.4, 0.1]])  # in sun, in rain
TRUTH = float((TARGET * PAYS).sum(axis=1).mean())
USERS, EVENTS, LOGS = 300, 30, 100
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#8C8C8C"


def log(seed: int) -> Records:
    """A log of 9,000 decisions; its reward model is the mean of each weather and action among the
    other half of the users.
    """
    rng = np.random.default_rng(seed)
    n = USERS * EVENTS
    rain, actions = rng.integers(0, 2, n), rng.choice(3, n, p=LOGGING)
    rewards = (rng.random(n) < PAYS[rain, actions]).astype(float)
    half, cell = np.repeat(np.arange(USERS) % 2, EVENTS), 3 * rain + actions
    counts = [np.bincount(cell[half != h], minlength=6) for h in (0, 1)]
    totals = [np.bincount(cell[half != h], rewards[half != h], minlength=6) for h in (0, 1)]
    model = (np.array(totals) / np.array(counts)).reshape(2, 2, 3)
    return Records(
        clients=np.arange(USERS),
        bounds=np.arange(USERS + 1) * EVENTS,
        rewards=rewards,
        propensities=LOGGING[actions],
        target=TARGET[actions],
        predicted=model[half, rain, actions],
        expected=model[half, rain] @ TARGET,
    )


def draw(path: Path) -> Path:
    """Both panels over one axis of rewards, with the truth as a line through them."""
    figure = empty_figure(9.0, 3.9)
    left, right = figure.subplots(1, 2, sharex=True, width_ratios=[3, 4])
    first = log(0)
    found = estimate(first, BUILT_IN)
    for place, one in enumerate(reversed(found.values())):
        _interval(left, place, one)
    earned = float(first.rewards.mean())
    left.plot(earned, len(found), "D", color=GREY)
    left.set_yticks(range(len(found) + 1), [*reversed(found), "the log itself"], fontsize=9)
    left.set_title("One log of 9,000 decisions, every estimator", loc="left", fontsize=10)
    each = [estimate(log(seed), {"snips": BUILT_IN["snips"]})["snips"] for seed in range(LOGS)]
    for place, one in enumerate(each):
        _interval(right, place, one, 1.0)
    held = sum(one.interval.contains(TRUTH) for one in each)
    right.set_yticks([])
    right.set_title(
        f"{LOGS} such logs: {held} of the snips intervals hold the truth", loc="left", fontsize=10
    )
    for axes in (left, right):
        axes.axvline(TRUTH, color="#000000", linewidth=1, linestyle=(0, (4, 2)), zorder=0)
        axes.set_xlabel(f"reward per decision (dashed: the truth, {TRUTH:.3f})", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
    return save_picture(figure, path)


def _interval(axes, place: int, one: Estimate, width: float = 2.0) -> None:
    """A point with its interval: orange where that misses the truth, hollow where there is none."""
    if one.interval.refusal:
        axes.plot(one.value, place, "o", color=BLUE, markerfacecolor="none")
        return
    colour = BLUE if one.interval.contains(TRUTH) else ORANGE
    axes.plot([one.interval.low, one.interval.high], [place, place], color=colour, linewidth=width)
    axes.plot(one.value, place, "o", color=colour, markersize=2 * width)


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
