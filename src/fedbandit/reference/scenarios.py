"""The rewards of the paper's scenarios (section 4.2): a function of an example's labels and an action."""

from collections.abc import Callable

import numpy as np

from fedbandit.data.dataset import Header
from fedbandit.reference.inference import Reward


def scenario_rewards(name: str, header: Header) -> tuple[Reward, Reward | None]:
    """What the bandit phase pays, and what pre-training sees (None: there is no pre-training)."""
    upper_of = {lower: upper for upper, lower in header.lower_case.items()}
    counts = [max(1, count) for count in header.action_counts]
    by_count = sorted(range(header.num_actions), key=lambda a: -header.action_counts[a])

    def best_label(pay: Callable[[int, int], float]) -> Reward:
        # Rewards are kept in single precision, also where everything else is double.
        return lambda labels, action: max((float(np.float32(pay(label, action))) for label in labels), default=0.0)

    def frequent_only(fraction: float) -> Reward:
        seen = by_count[: max(1, round(fraction * header.num_actions))]
        return best_label(lambda label, a: 1.0 if a == label and label in seen else 0.0)

    exact = best_label(lambda label, a: 1.0 if a == label else 0.0)
    rarity = best_label(lambda label, a: max(counts) / counts[label] if a == label else 0.0)
    lower_pays_half = best_label(
        lambda label, a: 1.0 if a == label else 0.5 if header.lower_case.get(label) == a else 0.0
    )
    upper_pays_half = best_label(lambda label, a: 1.0 if a == label else 0.5 if upper_of.get(label) == a else 0.0)
    folded = best_label(lambda label, a: 1.0 if a == upper_of.get(label, label) else 0.0)

    if name == "scratch":
        return exact, None
    if name == "init":
        return exact, exact
    if name == "init-shift":
        return (exact, lower_pays_half) if header.lower_case else (rarity, frequent_only(1 / 5))
    if name == "init-shift-released":
        return (upper_pays_half, folded) if header.lower_case else (rarity, frequent_only(3 / 5))
    raise ValueError(f"the reference has no scenario named {name}")
