"""Which nodes are asked in a round, by chance that nobody can foresee, and which devices must rest.

Poisson sampling asks each node in reach with the accounted probability, whoever else there is: a device that is out of
reach takes part less often than accounted for, never more often.
"""

import random
from collections.abc import Collection, Sequence

from fedbandit.deploy.flower.deployment import Deployment
from fedbandit.simulation.state import State

_chance = random.SystemRandom()


def select(deployment: Deployment, nodes: Sequence[int], number: int) -> list[int]:
    """The nodes to ask in a round."""
    plan = deployment.ledger and deployment.ledger.plan
    if plan and plan.sampling == "poisson":
        return [node for node in nodes if _chance.random() < plan.probability]
    return _chance.sample(list(nodes), min(len(nodes), deployment.config.clients_per_round))


def select_judges(nodes: Sequence[int], trained: Collection[int], most: int) -> list[int]:
    """The nodes to ask about a candidate: others than those asked to train on their logs, as far as there are any."""
    others = [node for node in nodes if node not in trained]
    rest = [node for node in nodes if node in trained]
    chosen = _chance.sample(others, min(len(others), most))
    return chosen + _chance.sample(rest, min(len(rest), most - len(chosen)))


def resting(deployment: Deployment, state: State, number: int) -> dict[str, int]:
    """Devices whose turn the privacy plan does not let it be, with the round of their last one.

    The accounting counts on blocks whose turns come round: not any rest of `separation` rounds or more, but turns in
    every `separation`-th round from the first. Others can meet in more of the noise's rows and cost more.
    """
    plan = deployment.ledger and deployment.ledger.plan
    if not plan or plan.sampling != "min-separation":
        return {}
    turns = state.extra.get("last_turn", {})
    return {device: last for device, last in turns.items() if (number - last) % plan.separation}
