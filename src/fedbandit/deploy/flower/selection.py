"""Which nodes are asked in a round, by chance that nobody can foresee, and which devices must rest.

Poisson sampling asks each node in reach with the accounted probability, whoever else there is: a device that is out of
reach takes part less often than accounted for, never more often.
"""

import random
from collections.abc import Sequence

from fedbandit.deploy.flower.deployment import Deployment
from fedbandit.simulation.state import State

_chance = random.SystemRandom()


def select(deployment: Deployment, nodes: Sequence[int], number: int) -> list[int]:
    """The nodes to ask in a round."""
    plan = deployment.ledger and deployment.ledger.plan
    if plan and plan.sampling == "poisson":
        return [node for node in nodes if _chance.random() < plan.probability]
    return _chance.sample(list(nodes), min(len(nodes), deployment.config.clients_per_round))


def resting(deployment: Deployment, state: State, number: int) -> dict[str, int]:
    """Devices whose last turn is too recent for the privacy plan, with the round of that turn."""
    plan = deployment.ledger and deployment.ledger.plan
    if not plan or plan.sampling != "min-separation":
        return {}
    turns = state.extra.get("last_turn", {})
    return {device: last for device, last in turns.items() if number - last < plan.separation}
