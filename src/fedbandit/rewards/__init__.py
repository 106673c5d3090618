"""What an action earns: tables of rewards, the scenarios of the paper, and drift."""

from fedbandit.rewards.tables import (
    GroupedRewards,
    Rewards,
    RewardTable,
    exact_match,
    per_label,
    relabelled,
    with_near_miss,
)

__all__ = [
    "GroupedRewards",
    "RewardTable",
    "Rewards",
    "exact_match",
    "per_label",
    "relabelled",
    "with_near_miss",
]
