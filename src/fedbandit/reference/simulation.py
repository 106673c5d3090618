"""Algorithm 4, rounds and deployments, in the scenarios of section 4.2 and in a world of clicks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbandit.core.randomness import Purpose, bits, generator
from fedbandit.data.dataset import FederatedDataset, Header
from fedbandit.reference.inference import (
    Explore,
    Pay,
    Reward,
    Visit,
    bandit_inference,
    epsilon_greedy,
    make_policy,
    pay_a_click,
    pay_the_mean,
    population_visits,
    simple_visits,
)
from fedbandit.reference.models import ReferenceModel, Weights, make_model
from fedbandit.reference.optimization import (
    OBJECTIVES,
    OPTIMIZERS,
    DoublyRobust,
    Loss,
    aggregate,
    client_update,
    next_clip_norm,
    norm_of,
)


def scenario_rewards(name: str, header: Header) -> tuple[Reward, Reward | None]:
    """The rewards of the bandit phase, and of pre-training (None: there is no pre-training)."""
    upper_of = {lower: upper for upper, lower in header.lower_case.items()}
    counts = [max(1, count) for count in header.frequencies]
    by_count = sorted(range(header.num_actions), key=lambda a: -header.frequencies[a])

    def best_label(pay: Callable[[int, int], float]) -> Reward:
        # Rewards are kept in single precision, also where everything else is double.
        return lambda labels, action: max(
            (float(np.float32(pay(label, action))) for label in labels), default=0.0
        )

    def frequent_only(fraction: float) -> Reward:
        seen = by_count[: max(1, round(fraction * header.num_actions))]
        return best_label(lambda label, a: 1.0 if a == label and label in seen else 0.0)

    exact = best_label(lambda label, a: 1.0 if a == label else 0.0)
    rarity = best_label(lambda label, a: max(counts) / counts[label] if a == label else 0.0)
    lower_pays_half = best_label(
        lambda label, a: 1.0 if a == label else 0.5 if header.lower_case.get(label) == a else 0.0
    )
    upper_pays_half = best_label(
        lambda label, a: 1.0 if a == label else 0.5 if upper_of.get(label) == a else 0.0
    )
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


def click_probabilities(
    reward: Reward, actions: int, least: float = 0.0, most: float = 1.0
) -> Reward:
    """From `least` to `most` as a table's rewards go from 0 to 1, or to its highest value."""
    pairs = [(label, a) for label in range(actions) for a in range(actions)]
    highest = max((reward([label], a) for label, a in pairs), default=1.0)  # over candidates: 1
    scale = (most - least) / max(1.0, highest)
    return lambda labels, action: float(np.float32(least + scale * reward(labels, action)))


@dataclass(frozen=True)
class Phase:
    """One phase of a run: supervised pre-training, or the bandit rounds
    after it.
    """

    rounds: int
    seed: int
    pool: range  # the clients that may be drawn
    deploy_every: int
    visits: Callable[[int, int], list[Visit]]  # of a client in a round
    explore: Explore
    reward: Reward
    pay: Pay
    loss: Loss
    client_learning_rate: float
    optimizer: tuple[str, dict[str, Any]]
    clients_per_round: int
    clipping: Any
    training: bool = True


def run(config: Any, dataset: FederatedDataset) -> tuple[list[dict[str, Any]], Weights]:
    """A whole run: each bandit round's metrics, and the weights after the last one."""
    if config.privacy.mechanism != "none" or config.gate.confidence is not None:
        raise ValueError("the reference has no privacy and no gate before deployments")
    model = make_model(config.model.name, config.model.parameters, dataset.header)
    reward, pretraining_reward = world_of(config, dataset.header)
    theta, initial_clients = model.init(config.seed), 0
    if pretraining_reward is not None:
        before = pretraining_phase(config, dataset, pretraining_reward)
        theta, initial_clients = model.init(config.pretraining.seed), config.pretraining.clients
        _, theta = run_phase(before, model, theta, config, dataset)
    phase = bandit_phase(config, dataset, reward, initial_clients)
    return run_phase(phase, model, theta, config, dataset)


def world_of(config: Any, header: Header) -> tuple[Reward, Reward | None]:
    """The mean rewards of the bandit phase and of pre-training, in the environment that is
    named.
    """
    reward, before = scenario_rewards(config.scenario, header)
    chosen = config.environment
    if chosen.name not in PAYS or chosen.missing or chosen.delay:
        raise ValueError(f"the reference has no {chosen.name}, and no missing or late rewards")
    if chosen.name == "labels":
        return reward, before
    clicks = [
        one and click_probabilities(one, header.num_actions, **chosen.parameters)
        for one in (reward, before)
    ]
    return clicks[0] or reward, clicks[1]


PAYS: dict[str, Pay] = {"labels": pay_the_mean, "bernoulli": pay_a_click}


def run_phase(
    phase: Phase, model: ReferenceModel, theta: Weights, config: Any, dataset: FederatedDataset
) -> tuple[list[dict[str, Any]], Weights]:
    """Algorithm 4 from the initial model θ_0: metrics and final weights."""
    deployed = [theta]  # deployed[i] is θ_i
    name, parameters = phase.optimizer
    optimizers = {part: OPTIMIZERS[name](**parameters) for part in theta}
    clip_norm = initial_clip_norm(phase.clipping)
    history: list[dict[str, Any]] = []

    for t in range(1, phase.rounds + 1):
        rng = generator(phase.seed, Purpose.COHORT, t)
        cohort = [
            phase.pool[i]
            for i in rng.choice(len(phase.pool), phase.clients_per_round, replace=False)
        ]
        logs, updates = [], []
        for c in cohort:
            log = bandit_inference(
                c,
                phase.visits(c, t),
                dataset.train,
                model,
                deployed,
                phase.explore,
                phase.reward,
                phase.pay,
                phase.seed,
            )
            update = client_update(
                model,
                theta,
                log if phase.training else [],
                phase.loss,
                phase.client_learning_rate,
                config.client.batch_size,
                config.client.epochs,
            )
            logs.append(log)
            updates.append(update)
        delta = aggregate(updates, clip_norm)
        theta = {part: optimizers[part].step(theta[part], delta[part]) for part in theta}

        fresh = [event for log in logs for event in log if event.fresh]
        norms = [norm_of(update) for update in updates]
        history.append(
            {
                "round": t,
                "reward": float(np.mean([event.reward for event in fresh])) if fresh else None,
                "propensity": float(np.mean([event.propensity for event in fresh]))
                if fresh
                else None,
                "events": len(fresh),
                "clients": len(cohort),
                "clip_norm": clip_norm if math.isfinite(clip_norm) else None,
                "unclipped": float(np.mean([norm <= clip_norm for norm in norms])),
                "update_norm": norm_of(delta),
                "client_norm_median": float(np.median(norms)),
                "model_version": len(deployed) - 1,
            }
        )
        if phase.pay is pay_a_click:
            lost = [max(event.all_rewards) - event.all_rewards[event.action] for event in fresh]
            history[-1]["regret"] = float(np.mean(lost)) if lost else None
        rewards = [line["reward"] for line in history if line["reward"] is not None]
        history[-1]["running_reward"] = float(np.mean(rewards)) if rewards else None

        if phase.clipping.enabled and phase.clipping.norm is None:
            quantile = 0.8 if phase.clipping.quantile is None else phase.clipping.quantile
            clip_norm = next_clip_norm(clip_norm, norms, quantile, phase.clipping.rate)
        if t % phase.deploy_every == 0:
            deployed.append(theta)
    return history, theta


def bandit_phase(
    config: Any, dataset: FederatedDataset, reward: Reward, initial_clients: int
) -> Phase:
    """Everybody but the initial clients explores, and learns from the rewards of what was tried."""
    split, seed = dataset.train, config.seed

    def visits(client: int, t: int) -> list[Visit]:
        if config.mode == "simple":
            return simple_visits(
                split, client, t, seed, config.deploy_every, config.client.max_examples
            )
        living = config.population.model_dump()
        most = config.client.max_examples or living["events_per_period"]
        living["events_per_period"] = min(living["events_per_period"], most)
        return population_visits(split, client, t, seed, config.deploy_every, **living)

    return Phase(
        rounds=config.rounds,
        seed=seed,
        pool=range(initial_clients, split.num_clients),
        deploy_every=config.deploy_every,
        visits=visits,
        explore=make_policy(config.policy.name, config.policy.parameters),
        reward=reward,
        pay=PAYS[config.environment.name],
        loss=bandit_loss(config, dataset.header.num_actions),
        client_learning_rate=config.client.learning_rate,
        optimizer=(config.server.optimizer, config.server.parameters),
        clients_per_round=config.clients_per_round,
        clipping=config.clipping,
        training=config.training,
    )


def pretraining_phase(config: Any, dataset: FederatedDataset, reward: Reward) -> Phase:
    """The first clients by id act greedily with the newest model, and learn from the rewards of all
    actions.
    """
    chosen = config.pretraining
    seed = int(bits(chosen.seed, Purpose.PRETRAINING))
    optimizer = chosen.server_optimizer or config.server.optimizer
    parameters = config.server.parameters if optimizer == config.server.optimizer else {}
    rate = chosen.server_learning_rate or config.server.learning_rate
    most = {"same": config.client.max_examples, "all": None}.get(
        chosen.max_examples, chosen.max_examples
    )
    cohort = config.clients_per_round
    if chosen.clients_per_round != "same":
        cohort = min(chosen.clients_per_round, chosen.clients)
    return Phase(
        rounds=chosen.rounds,
        seed=seed,
        pool=range(chosen.clients),
        deploy_every=1,
        visits=lambda c, t: simple_visits(dataset.train, c, t, seed, 1, most),
        explore=lambda scores: epsilon_greedy(scores, 0.0),
        reward=reward,
        pay=PAYS[config.environment.name],
        loss=Loss(
            chosen.objective.endswith("cross-entropy"), all_actions=True, reduction=chosen.reduction
        ),
        client_learning_rate=chosen.client_learning_rate or config.client.learning_rate,
        optimizer=(optimizer, {**parameters, "learning_rate": rate}),
        clients_per_round=cohort,
        clipping=pretraining_clipping(config),
    )


def pretraining_clipping(config: Any) -> Any:
    """The clipping of pre-training: that of the bandit phase unless it has one of its own."""
    chosen, same = config.pretraining.clip_norm, config.clipping
    if chosen == "same":
        return same
    changes = {"enabled": chosen != "none", "norm": None if isinstance(chosen, str) else chosen}
    return same.model_copy(update={**changes, "quantile": None, "initial": None})


def bandit_loss(config: Any, actions: int) -> Loss:
    """The loss that a configuration names; the weights of ε-greedy are scaled so that the largest
    is 1.
    """
    name, parameters = config.objective.name, config.objective.parameters
    if name not in OBJECTIVES:
        raise ValueError(f"the reference has no objective {name}")
    if name == "doubly-robust":
        return DoublyRobust(**parameters)
    scale = None
    if name.startswith("weighted"):
        scale = 1.0
        if config.policy.name == "epsilon-greedy":
            epsilon = config.policy.parameters.get("epsilon", 0.05)
            scale = epsilon / actions if epsilon > 0 else 1.0
        scale = parameters.get("scale", scale)
    return Loss(
        name.endswith("cross-entropy"), scale=scale, reduction=parameters.get("reduction", "mean")
    )


def initial_clip_norm(clipping: Any) -> float:
    """The clip norm of the first round; infinite where nothing is clipped."""
    if not clipping.enabled:
        return math.inf
    return (clipping.initial or 1.0) if clipping.norm is None else float(clipping.norm)
