"""Rounds for an audit to look at: real simulations and a real server, with planted clients.

Knows what planted clients sent and what came out; judges nothing.
"""

import logging
import math
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import refuse
from fedbandit.core.process import Stopwatch
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, generator
from fedbandit.data import FederatedDataset
from fedbandit.data.dataset import Header, Split
from fedbandit.deploy.messages import Reply, Request, with_protocol
from fedbandit.deploy.server.deployment import Deployment, build_deployment
from fedbandit.deploy.server.private_metrics import RoundNoise
from fedbandit.deploy.server.rounds import Coordinator
from fedbandit.deploy.server.store import Store
from fedbandit.engines import ThreadEngine
from fedbandit.federated.pipeline import AdaptiveClipping
from fedbandit.federated.round import run_round
from fedbandit.federated.server import PlainMean
from fedbandit.privacy.noise import RELEASE
from fedbandit.privacy.plan import PrivacyPlan

Target = Literal["simulation", "system", "deployment"]
RATE = 30.0  # of planted clients' training: nearly every update is far longer than the clip norm
_MOST_CLIENTS = 2000  # each has a feature, or a weight, of its own
_SINGLE = 1500  # draws of what a round releases once: enough to find a tenth less noise
_LOUD = 10.0  # clip norms, sent by hostile devices
_SHARE = 0.1  # of a deployment's budget, for figures and for the gate, where nothing is set


@dataclass(frozen=True)
class Case:
    """A private configuration and the clients it is for: what one audit is about."""

    config: Config
    population: int


@dataclass(frozen=True)
class AuditedRun:
    """Releases of an audited run, beside what its planted clients sent; [T, P]: rounds, weights."""

    plan: PrivacyPlan
    released: np.ndarray  # [T, P]: sums with noise, in clip norms
    sent: np.ndarray  # [T, P]: sums of what was sent, each client's clipped to 1
    taking: np.ndarray  # bool [T, clients]
    loud: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))  # [T, P]: of hostile devices
    counts: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # noise of counts, in deviations
    figures: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))  # [T, ...], likewise
    grid: float | None = None  # the step of releases, in clip norms

    @property
    def encoder(self) -> np.ndarray:
        """C [T, T], by its columns: what the accounting rests on."""
        rounds = self.plan.rounds
        found = np.zeros((rounds, rounds))
        for number in range(1, rounds + 1):
            rows, entries = self.plan.strategy.column(number, rounds)
            found[rows - 1, number - 1] = entries
        return found

    def white(self, rounds: np.ndarray) -> np.ndarray:
        """C x / z, in which noise of the stated size is independent standard normals: [T, P]."""
        found: np.ndarray = self.encoder @ rounds / self.plan.update_multiplier
        return found


def audited_run(case: Case, target: Target, seed: int, weights: int) -> AuditedRun:
    """One whole run of the case on its target, with a model of about this many weights."""
    refuse(
        (
            case.population > _MOST_CLIENTS,
            f"population: an audit plants each client, {_MOST_CLIENTS} at most; divide population"
            " and clients per round alike, which keeps the sampling probability",
        )
    )
    if target == "deployment":
        return _deployed(case, seed, weights)
    return _simulated(case, target, seed, weights)


class _Recording(ThreadEngine):
    """The engine of simulations, which remembers whom a round asked."""

    asked: np.ndarray

    def run(self, work: Any, chunks: list[np.ndarray], *rest: Any) -> Iterator[Any]:
        """The results of the chunks, as ever; whom they are about is kept."""
        self.asked = np.concatenate([np.zeros(0, np.int64), *chunks])
        return super().run(work, chunks, *rest)


def _simulated(case: Case, target: Target, seed: int, weights: int) -> AuditedRun:
    """A whole simulation on planted clients: client i has one example, whose only feature is i.

    One step of training moves the weight of that feature and the bias of the chosen action by the
    same amount, mostly far more than the clip norm: what is left is the sign of the error, which
    changes with the model.
    """
    clients = case.population
    actions = max(2, math.ceil(max(weights, 3 * case.config.rounds) / (clients + 1)))
    changes = {"seed": seed, "privacy.noise": "seed" if target == "simulation" else "system"}
    if target == "system":
        changes["dtype"] = "float64"  # so that its steps can be counted
    experiment = build_experiment(case.config.with_values(changes), _planted(clients, actions))
    phase, layout = experiment.bandit, experiment.layout
    assert experiment.privacy is not None
    plan, engine = experiment.privacy.plan, _Recording(1)
    state = phase.start(experiment.initial_weights())
    shape = (plan.rounds, len(state.weights))
    released, sent, taking = (
        np.zeros(shape),
        np.zeros(shape),
        np.zeros((plan.rounds, clients), bool),
    )
    counts = []
    for t in range(plan.rounds):
        before = state
        state, _ = run_round(phase, before, engine, Stopwatch())
        asked = engine.asked
        taking[t, asked] = True
        acting, training = (
            layout.split(of.astype(np.float64))
            for of in (before.deployed[max(before.deployed)].weights, before.weights)
        )
        chosen = (acting["weight"][asked] + acting["bias"]).argmax(axis=1)
        score = training["weight"][asked, chosen] + training["bias"][chosen]
        moved = 2 * RATE * ((chosen == 0) - score) / before.clip_norm  # squared error
        moved /= np.maximum(1.0, math.sqrt(2) * np.abs(moved))
        parts = layout.split(sent[t])
        np.add.at(parts["weight"], (asked, chosen), moved)
        np.add.at(parts["bias"], chosen, moved)
        step = state.weights.astype(np.float64) - before.weights
        released[t] = step * plan.clients_per_round / before.clip_norm
        counts += _count_noise(plan, before.clip_norm, state.clip_norm, len(asked))
    engine.close()
    counts += _counts(phase.aggregation, plan)
    grid = RELEASE.step if target == "system" else None
    return AuditedRun(plan, released, sent, taking, counts=np.array(counts), grid=grid)


def _planted(clients: int, actions: int) -> FederatedDataset:
    """One example a client, with a feature of its own and label 0."""
    labels = Ragged.from_rows([[0]] * clients)
    counts = (clients, *[0] * (actions - 1))
    names = tuple(f"a{i}" for i in range(actions))
    header = Header("planted clients", "dense", (clients,), names, counts, fingerprint="planted")
    ids = np.array([f"c{i:06d}" for i in range(clients)], dtype=bytes)
    features = np.eye(clients, dtype=np.float32)
    return FederatedDataset(header, Split(ids, np.arange(clients + 1), features, labels))


def _count_noise(plan: PrivacyPlan, before: float, after: float, clients: int) -> list[float]:
    """The noise of a count of unclipped clients, read from the move of the clip norm.

    No planted client was unclipped, so the count itself is 0.
    """
    if not isinstance(plan.clipping, AdaptiveClipping):
        return []
    share = plan.clipping.quantile - math.log(after / before) / plan.clipping.rate
    return [((share - 0.5) * plan.clients_per_round + clients / 2) / plan.count_deviation]


def _counts(aggregation: PlainMean, plan: PrivacyPlan) -> list[float]:
    """The same of counts of nobody, in as many rounds as it takes to find short noise."""
    if not plan.adaptive:
        return []
    shares = [aggregation.unclipped(0, 0, number) for number in range(1001, 1001 + _SINGLE)]
    per = plan.clients_per_round / plan.count_deviation
    return [(share - 0.5) * per for share in shares if share is not None]


class _PlantedDevices:
    """A transport whose devices each own a weight and send the clip norm there.

    Every tenth is hostile and sends ten times as much, which a server has to refuse.
    """

    def __init__(self, deployment: Deployment, devices: int, seed: int) -> None:
        self.hostile = np.arange(devices) % 10 == 9
        self.asked: list[int] = []
        self.sent = self.loud = np.zeros(0)
        self._size, self._replies = deployment.initial.size, dict[str, Reply]()
        self._dtype = deployment.config.dtype
        self._rng, self._tickets = generator(seed, Purpose.SPLIT, 1), 0

    def nodes(self) -> list[int]:
        """Every planted device is in reach."""
        return list(range(len(self.hostile)))

    def begin(self) -> None:
        """Forget the round before."""
        self.asked, self.sent, self.loud = [], np.zeros(self._size), np.zeros(self._size)

    def send(self, requests: Sequence[Request]) -> list[str]:
        """Answer every request; the tickets are those of the replies."""
        tickets = [f"t{self._tickets + i}" for i in range(len(requests))]
        self._tickets += len(requests)
        for request, ticket in zip(requests, tickets, strict=True):
            train = request.kind == "train"
            facts, arrays = self._trained(request) if train else (request.facts, {})
            self._replies[ticket] = Reply(ticket, facts, arrays)
        return tickets

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        """The replies of these tickets, each given once."""
        return [self._replies.pop(ticket) for ticket in tickets if ticket in self._replies]

    def _trained(self, request: Request) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """A device's report: its sign at its own weight, too long where it is hostile."""
        sign, hostile = self._rng.choice((-1.0, 1.0)), bool(self.hostile[request.node])
        self.asked.append(request.node)
        (self.loud if hostile else self.sent)[request.node] = sign
        update = np.zeros(self._size, self._dtype)
        update[request.node] = sign * request.facts["clip_norm"] * (_LOUD if hostile else 1.0)
        since = request.facts.get("counted") or 0
        facts = {"device": f"device-{request.node}", "token": request.facts["token"]}
        facts |= {"version": 0, "since": since, "upto": since + 1, "unclipped": False}
        facts |= {
            "events": 1,
            "reward_sum": 1.0,
            "propensity_sum": 1.0,
            "by_version": [[0, 1, 1.0]],
        }
        return with_protocol(facts), {"update": update}


def _deployed(case: Case, seed: int, weights: int) -> AuditedRun:
    """The rounds of a real server, with planted devices that never keep it waiting."""
    size = max(weights, 3 * case.config.rounds, 2 * (case.population + 2))
    values = case.config.model_dump(exclude_defaults=True, exclude={"scenario", "threads"})
    values["privacy"] = {"figures_share": _SHARE, "gate_share": _SHARE, **values["privacy"]}
    values |= {
        "dtype": "float64",
        "gate": {"confidence": 0.95, "limit": 5.0},
        "policy": {"name": "softmax"},
    }
    values["deployment"] = {
        "state": "server", "actions": ["a", "b"], "shape": [math.ceil(size / 2) - 1],
        "population": case.population, "max_events": 10, "min_reach": 0.0,
    }  # fmt: skip
    values["deploy_every"] = case.config.deploy_every
    with tempfile.TemporaryDirectory() as folder:
        deployment = build_deployment(values, Path(folder))
        assert deployment.ledger is not None
        plan, devices = deployment.ledger.plan, _PlantedDevices(deployment, case.population, seed)
        store, logger = Store(deployment.folder), logging.getLogger("fedbandit.deploy.server")
        level = logger.level
        logger.setLevel(logging.ERROR)  # the hostile are refused, which is not the auditor's news
        try:
            return _served(deployment, plan, devices, store)
        finally:
            logger.setLevel(level)
            store.close()


def _served(
    deployment: Deployment, plan: PrivacyPlan, devices: _PlantedDevices, store: Store
) -> AuditedRun:
    """Run every round of the plan on planted devices, and read off what each released."""
    server = Coordinator(deployment, store, devices, clock=lambda: 0.0, sleep=lambda _: None)
    shape = (plan.rounds, deployment.initial.size)
    released, sent, loud = (np.zeros(shape) for _ in range(3))
    taking = np.zeros((plan.rounds, len(devices.hostile)), bool)
    counts: list[float] = []
    told = np.zeros((plan.rounds, 2))  # noise of events and rewards, as published
    for t in range(plan.rounds):
        before = server.state
        devices.begin()
        if server.attempt() is None:
            raise ValueError("deployment: its server ran no round on planted devices")
        taking[t, devices.asked] = True
        sent[t], loud[t] = devices.sent, devices.loud
        step = server.state.weights - before.weights
        released[t] = step * plan.clients_per_round / before.clip_norm
        honest = int(taking[t, ~devices.hostile].sum())
        counts += _count_noise(plan, before.clip_norm, server.state.clip_norm, honest)
        totals, earlier = (of.extra.get("figures", {}) for of in (server.state, before))
        told[t] = [totals[of] - earlier.get(of, 0.0) - honest for of in ("events", "rewards")]
    counts += _counts(deployment.server(deployment.noise(0, {})).aggregation, plan)
    return AuditedRun(
        plan, released, sent, taking[:, ~devices.hostile], loud, np.array(counts),
        _figure_noise(deployment, plan, told), deployment.grid.step,
    )  # fmt: skip


def _figure_noise(deployment: Deployment, plan: PrivacyPlan, told: np.ndarray) -> np.ndarray:
    """[T, n]: the noise of figures and of the gate's sums, in the deviations that the plan needs.

    Of what the server told, and of sums over nobody, drawn round by round as the server does. A
    device moves events, rewards and propensities together by the share's root, and the gate's three
    sums likewise.
    """
    bounds = deployment.rules.bounds
    most = np.array([bounds.events, bounds.events * bounds.reward, bounds.events])
    figure = plan.noise_multiplier * most * math.sqrt(3 / plan.figures_share)
    gate = plan.noise_multiplier / np.sqrt(plan.gate_share * np.array([0.8, 0.1, 0.1]))
    found = [told / figure[:2]]
    for _ in range(math.ceil(_SINGLE / (6 * plan.rounds))):
        rows, memory = [], dict[int, np.ndarray]()
        for number in range(1, plan.rounds + 1):
            noise = RoundNoise(plan, number, memory, deployment.noise)
            noise.weights.update(number, np.zeros(1))
            figures = noise.figures(np.zeros(3), bounds)
            assert figures is not None
            rows.append(
                np.concatenate([figures.sums / figure, noise.gate(np.zeros(3)).sums / gate])
            )
            memory = noise.memory
        found.append(np.array(rows))
    return np.concatenate(found, axis=1)
