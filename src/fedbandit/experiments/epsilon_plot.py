"""Epsilon against rounds, as a picture."""

from pathlib import Path

import numpy as np

from fedbandit.privacy.accounting import Ledger
from fedbandit.privacy.reporting import MEANINGLESS, assumptions

_EXACT_POINTS = 12  # a privacy loss distribution takes a second each


def draw_epsilon(ledger: Ledger, path: Path) -> Path:
    """Epsilon by RDP after every round, and by privacy loss distributions at some, saved by the path's suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from fedbandit.experiments.plots import require_picture, save_picture, write_heading

    require_picture(path)
    plan = ledger.plan
    rounds = np.unique(np.linspace(1, plan.rounds, min(plan.rounds, 200)).astype(int))
    # Closer together at the beginning, where epsilon bends.
    some = np.unique(1 + np.square(np.linspace(0, 1, _EXACT_POINTS)) * (plan.rounds - 1)).astype(int)
    by_rdp = [ledger.epsilon(int(number)) for number in rounds]
    by_pld = [ledger.tight_epsilon(int(number)) for number in some]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(rounds, by_rdp, color="#0072B2", linewidth=1.6, label="RDP")
    axes.plot(some, by_pld, color="#D55E00", linewidth=1.6, marker="o", markersize=3, label="PLD")
    if max(by_rdp) > MEANINGLESS:
        axes.axhspan(MEANINGLESS, max(by_rdp), color="#eeeeee", zorder=0, label="no meaningful guarantee")
    axes.set(xlabel="round", ylabel=f"epsilon at delta = {plan.delta:g}", ylim=(0, None), xlim=(1, plan.rounds))
    title = f"noise {plan.noise_multiplier:g}, {plan.clients_per_round} of {plan.population:,} clients a round"
    write_heading(axes, title, f"{plan.sampling} sampling; adjacency: {assumptions(plan)['adjacency']}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return save_picture(figure, path)
