"""From one TOML file to the parts of a deployment: the sections of a simulation, and `[deployment]`
for the rest.

Whatever does not fit together, or has no meaning on real devices, is refused here with the path of
its key.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbandit.assembly.parts import (
    acting_model,
    build_aggregation,
    build_algorithm,
    build_clipping,
    build_objective,
    build_optimizer,
    build_policy,
    check_personal,
    try_policy,
)
from fedbandit.assembly.privacy import build_ledger
from fedbandit.config import Config, Count, Positive, read_toml
from fedbandit.core.errors import ConfigError, DataError, first_problem
from fedbandit.core.files import read_object, read_packed, read_small
from fedbandit.data.encoder import Encoder
from fedbandit.deploy.device.model_files import DeviceModel
from fedbandit.deploy.secure_sums import (
    LEAST,
    LEVELS,
    MODULUS,
    MOST,
    MOST_EVENTS,
    MOST_SHARES,
    RANGE,
    STEP,
    ReportBounds,
    clip_share,
)
from fedbandit.evaluation.gate import why_impossible
from fedbandit.federated.algorithm import Algorithm
from fedbandit.federated.learners.make_learner import Trainable
from fedbandit.federated.pipeline import Vectors, zeros_to_send
from fedbandit.federated.server import PlainMean, Server, join_sent
from fedbandit.federated.state import State, Version
from fedbandit.models import DataSpec, Freezing
from fedbandit.policies import Progress, described_at, importance_scale
from fedbandit.privacy.accounting import Ledger, Redraws, finite
from fedbandit.privacy.noise import (
    RELEASE,
    SECURE,
    Grid,
    GridMean,
    GridNoise,
    NoiseInSum,
    room_needed,
)
from fedbandit.privacy.reporting import summary, towards_server
from fedbandit.privacy.strategies import Memory, with_coefficients

_MEANINGLESS = (
    "scenario",
    "mode",
    "data",
    "pretraining",
    "population",
    "drift",
    "training",
    "evaluate_every",
)
# noise for a budget is computed to four digits, and may be a step apart on another machine
_CALIBRATION = 2e-3
T = TypeVar("T")
LEAST_JUDGES = 3  # devices that judge a candidate: without any one of them two must be left


class Rules(BaseModel):
    """The `[deployment]` section. Paths are relative to the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state: str  # folder of checkpoints, metrics and models
    # their names, or a text file with one a line; None: over candidates, as `initial` has them
    actions: tuple[str, ...] | str | None = None
    vocabulary: str | None = None  # a text file with one word a line, for contexts that are texts
    encoder: str | None = (
        None  # the header.json of a data set made from a table, for contexts by column
    )
    shape: tuple[Count, ...] | None = None  # of contexts that are dense features
    initial: str | None = None  # a model file to start from
    population: Count | None = (
        None  # devices that may ever take part: what the privacy accounting counts on
    )
    min_reach: Annotated[float, Field(ge=0, le=1)] = (
        0.1  # part of the population in reach before a private round begins
    )
    report_goal: Count | None = (
        None  # reports that end a round early; None: wait for all that were asked
    )
    min_reports: Count = (
        1  # fewer, and the round is run again; also the nodes to wait for before one begins
    )
    round_seconds: Positive = 120.0
    install_seconds: Positive = (
        60.0  # how long a new model may take to reach the nodes before the round begins
    )
    poll_seconds: Positive = 0.2
    keep_versions: Annotated[int, Field(ge=2)] = 5
    secure_aggregation: bool = False  # the server sees sums only; the rest is for this
    secure_seconds: Positive = 60.0  # for each exchange of keys; training has round_seconds
    secure_shares: Annotated[int, Field(ge=LEAST, le=MOST_SHARES)] = (
        25  # devices that keep shares of one's secrets
    )
    secure_threshold: Annotated[float, Field(ge=2 / 3, le=1)] = (
        2 / 3  # the part of them that has to stay until the end
    )
    max_dropout: Annotated[float, Field(ge=0, lt=1)] = (
        0.3  # part of the devices in reach that would drop out if asked
    )
    max_events: Annotated[int, Field(ge=1, le=MOST_EVENTS)] = (
        1000  # that one device reports in one round
    )
    max_reward: Positive = (
        1.0  # larger ones are counted as this; both bound reports, secure sums and the gate
    )

    @property
    def bounds(self) -> ReportBounds:
        return ReportBounds(self.max_events, self.max_reward)

    def least_reach(self, private: bool) -> int:
        """The nodes that have to be in reach before a round begins.

        A private round costs the same whoever takes part: it has to be worth its price before
        anybody is drawn. Looking at who was drawn would be too late: the accounting counts on it.
        """
        part = self.min_reach * (self.population or 0) if private else 0.0
        return max(self.min_reports, math.ceil(part))


@dataclass(frozen=True)
class Deployment:
    """All that stays the same from round to round."""

    config: Config
    rules: Rules
    folder: Path
    trainable: Trainable
    data: DataSpec
    meaning: Mapping[str, Any]  # of contexts and actions, as the fields of a `DeviceModel` say it
    learning: dict[str, Any]  # what devices receive about how to train
    ledger: Ledger | None
    initial: np.ndarray
    freezing: Freezing | None = None  # what devices neither train nor send

    @cached_property
    def untrained(self) -> str:
        """Names what training leaves alone, which all devices of a secure sum must have alike."""
        frozen = () if self.freezing is None else self.freezing.frozen
        return self._first_model.untrained(frozen)

    @property
    def rounds(self) -> int:
        return self.config.rounds if self.ledger is None else self.ledger.last_round

    def device_model(self, deployed: Version, version: int) -> DeviceModel:
        """A deployed version, weights and rule, as the model that devices act with."""
        policy, described = build_policy(self.config), self.config.policy.model_dump()
        return DeviceModel(
            version=version,
            weights=self.acting.layout.split(deployed.weights),
            policy=described_at(described, policy, deployed.progress),
            model=self.acting.described,
            **self.meaning,
        )

    @cached_property
    def algorithm(self) -> Algorithm:
        """The federated algorithm: how devices train, and how the server learns from them."""
        chosen, freezing = self.config.server, self.freezing
        optimizer = build_optimizer("server.optimizer", chosen.optimizer, chosen.parameters)
        layout = self.trainable.layout if freezing is None else freezing.trainable
        objective, _ = build_objective(self.config, lambda: 1.0)
        plan = None if self.ledger is None else self.ledger.plan
        return build_algorithm(
            self.config, optimizer, self.data, layout, objective, plan, on_devices=True
        )

    @cached_property
    def acting(self) -> Trainable:
        """The model that devices act with; the trained one unless the algorithm deploys another."""
        return acting_model(
            self.algorithm, self.trainable, self.data, freezes=self.freezing is not None
        )

    @cached_property
    def aggregation(self) -> PlainMean:
        """The mean of the devices' updates, or the rule that combines them in its place."""
        return build_aggregation(self.config, self.algorithm, self.initial)

    @property
    def grid(self) -> Grid:
        """The grid whose steps private sums are counted in."""
        return SECURE if self.rules.secure_aggregation else RELEASE

    def noise(self, done: int, memory: Memory) -> GridNoise:
        """The noise of a private deployment after `done` rounds, on the grid of its sums."""
        assert self.ledger is not None
        plan = self.ledger.plan
        kind = GridNoise if self.ledger.tolerance is None else NoiseInSum
        return kind(plan.strategy, plan.update_multiplier / self.grid.step, done, memory)

    def server(self, noise: GridNoise | None) -> Server:
        """The server's step, with the noise of a private deployment."""
        clipping = build_clipping(self.config, self.algorithm)
        if self.ledger is None:
            return Server(self.algorithm, clipping, self.aggregation)
        assert noise is not None
        dtype = np.dtype(self.config.dtype)
        mean = GridMean(
            self.ledger.plan, noise, self.ledger, grid=self.grid, dtype=dtype, excess=self._excess
        )
        return Server(self.algorithm, clipping, mean)

    @property
    def _excess(self) -> float:
        tolerance = None if self.ledger is None else self.ledger.tolerance
        return 1.0 if tolerance is None else tolerance.excess(self.config.clients_per_round)

    def start(self) -> State:
        """The state before the first round: the initial model is version 0."""
        kept = self.kept(self.initial)
        first = self._first(kept)
        return State(
            round=0,
            weights=first.weights,
            deployed={0: first},
            server_state=kept,
            clip_norm=build_clipping(self.config, self.algorithm).initial,
            extra={
                "promises": self.promises(),
                "versions": [{"version": 0, "round": 0, "why": "the initial model"}],
                **self.spent(0, False),
            },
        )

    def spent(self, rounds: int, tight: bool) -> dict[str, Any]:
        """The cost of this many rounds, with all that it means; nothing of a deployment that is
        not private.
        """
        if self.ledger is None:
            return {}
        shares = self.rules.secure_shares
        found = summary(
            self.ledger, rounds, deployed=True, tight=tight, grid=self.grid, neighbours=shares
        )
        return {"privacy": found}

    def kept(self, weights: np.ndarray) -> Vectors:
        """The algorithm's server state at the start of training from these weights: [P]."""
        return self.algorithm.init(
            weights if self.freezing is None else self.freezing.pick(weights)
        )

    def received(self, state: State) -> np.ndarray:
        """The weights that the devices of the next round train from."""
        return self.algorithm.broadcast(state.server_state)["weights"]

    def sent_by_one(self, state: State) -> np.ndarray:
        """Zeros like the vector that a device sends: all parts of its message, joined."""
        sends = self.algorithm.sends
        return join_sent(zeros_to_send(sends, self.received(state)), sends)

    def kept_from(self, version: Version) -> Vectors:
        """The algorithm's server state when training starts again from a deployed version."""
        if self.acting is self.trainable:
            return self.kept(version.weights)
        if hasattr(self.algorithm, "restore"):
            restored: Vectors = self.algorithm.restore(version.weights)
            return restored
        arrays = self.acting.layout.split(version.weights)
        return self.kept(self.trainable.layout.flatten(arrays, version.weights.dtype))

    def _first(self, kept: Vectors) -> Version:
        """Version 0, given what the algorithm keeps at the start."""
        weights = self.initial if self.freezing is not None else self.algorithm.model(kept)
        return Version(weights, Progress(actions=self._choices))

    @property
    def _choices(self) -> int:
        """The number of actions of a decision: fixed ones, or candidates on average."""
        items = self.data.items
        return self.data.num_actions if items is None else round(items.shown)

    def progress(self, version: int, number: int, events: int) -> Progress:
        """Progress that a version is deployed with after a round, which its rule may depend on.

        Under privacy it counts the planned events: the exact ones are not released.
        """
        if self.ledger is not None:
            events = number * self.config.clients_per_round * self.rules.max_events
        return Progress(version, number, events, self._choices)

    @cached_property
    def terms(self) -> dict[str, Any]:
        """The privacy terms in every request, which devices hold the server to; else empty."""
        if self.ledger is None:
            return {}
        plan, rounds = self.ledger.plan, self.rounds
        terms = {
            "rounds": rounds,
            "separation": plan.separation,
            "turns": plan.turns(rounds),
            "epsilon": finite(self.ledger.epsilon(rounds)),
            "delta": plan.delta,
        }
        if (tolerance := self.ledger.tolerance) is not None:
            terms |= {"noise": plan.noise_multiplier, **asdict(tolerance)}
            terms["epsilon"] = towards_server(self.ledger, rounds)["epsilon_rdp"]
        return {"privacy": terms}

    @cached_property
    def space(self) -> str:
        """Names what contexts and actions mean to this deployment's devices."""
        return self._first_model.space

    @cached_property
    def _first_model(self) -> DeviceModel:
        return self.device_model(self._first(self.kept(self.initial)), 0)

    def promises(self) -> dict[str, Any]:
        """All that must not change while a deployment lives.

        That is what weights mean, and what its devices were promised. A state with other promises
        is not continued.
        """
        return {
            "actions and features": self.space,
            "model": dict(self.acting.described),
            "dtype": self.config.dtype,
            "privacy": None if self.ledger is None else split_plan(repr(self.ledger.plan)),
            "secure aggregation": self.rules.secure_aggregation or None,
            "private figures": self._shares or None,
            "noise from devices": None
            if self.ledger is None or self.ledger.tolerance is None
            else asdict(self.ledger.tolerance),
        }

    @property
    def _shares(self) -> dict[str, Any]:
        """Shares and unit of the privacy plan, where they are not the defaults."""
        if self.ledger is None:
            return {}
        plan = self.ledger.plan
        said = {
            "figures_share": plan.figures_share,
            "gate_share": plan.gate_share,
            "unit": plan.unit,
        }
        return {name: value for name, value in said.items() if value not in (0.0, "client")}

    def resumed(self, state: State) -> "Deployment":
        """The deployment as the state was started with it; refuses a state with other promises.

        What was computed for its noise comes from the state: another machine would come to slightly
        different numbers.
        """
        kept = state.extra["promises"]
        own = (
            self
            if self.ledger is None or not kept.get("privacy")
            else self._with_noise_of(kept["privacy"])
        )
        for name, value in own.promises().items():
            if kept.get(name) != value:
                forgets = name == "privacy" and ", which forgets what was spent on these devices"
                raise ConfigError(
                    f"deployment.state: {self.folder}: was started with different {name};"
                    f" use a new folder{forgets or ''}"
                )
        return own

    def _with_noise_of(self, kept: Mapping[str, Any]) -> "Deployment":
        assert self.ledger is not None
        plan, multiplier, coefficients = (
            self.ledger.plan,
            kept["noise_multiplier"],
            kept["coefficients"],
        )
        chosen = self.config.privacy.noise_multiplier is not None
        if not chosen and math.isclose(multiplier, plan.noise_multiplier, rel_tol=_CALIBRATION):
            plan = replace(plan, noise_multiplier=multiplier)
        if coefficients is not None:
            plan = replace(plan, strategy=with_coefficients(plan.strategy, tuple(coefficients)))
        return replace(self, ledger=replace(self.ledger, plan=plan))


def split_plan(text: str) -> dict[str, Any]:
    """A privacy plan's own text as what was chosen and the numbers that were computed for it."""
    found: dict[str, Any] = {"noise_multiplier": None, "coefficients": None}

    def noise(match: re.Match[str]) -> str:
        found["noise_multiplier"] = float(match[1])
        return "noise_multiplier=*"

    def coefficients(match: re.Match[str]) -> str:
        found["coefficients"] = [float(value) for value in match[1].split(",") if value.strip()]
        return f"coefficients={len(found['coefficients'])}"

    text = re.sub(r"noise_multiplier=([^,)]+)", noise, text)
    return {"plan": re.sub(r"coefficients=\(([^)]*)\)", coefficients, text), **found}


def read_deployment(path: Path) -> Deployment:
    """The deployment that a TOML file describes."""
    return build_deployment(read_toml(path), path.resolve().parent, f"{path}: ")


def _refuse(where: str, *checks: tuple[object, str]) -> None:
    """Refuse a configuration for the first of (whether it is wrong, key and reason) that holds."""
    for wrong, problem in checks:
        if wrong:
            raise ConfigError(f"{where}{problem}")


def build_deployment(values: Mapping[str, Any], base: Path, where: str = "") -> Deployment:
    """The deployment of nested values as TOML gives them; its paths are relative to `base`."""
    simulated = "is for simulations; it has no meaning on real devices"
    _refuse(where, *((key in values, f"{key}: {simulated}") for key in _MEANINGLESS))
    rest = {key: value for key, value in values.items() if key != "deployment"}
    config = Config.build({"scenario": "scratch", **rest}, where)
    try:
        rules = Rules.model_validate(values.get("deployment", {}))
    except ValidationError as error:
        raise ConfigError(f"{where}deployment.{first_problem(error)}") from None
    _refuse(
        where,
        (
            not config.clipping.enabled,
            "clipping.enabled: without a clip norm one device could move the model at will",
        ),
    )
    files = _NamedFiles(base, where)
    given = files.read("initial", rules.initial, _model)
    meaning = _over_actions(rules, files, where) or _over_candidates(rules, given, where)
    kind, shape = meaning["kind"], meaning["shape"]
    data = DataSpec(kind, shape, len(meaning["actions"]), meaning.get("items"))
    trainable = Trainable.of(config.model.described, data)
    freezing = Freezing.of(trainable.layout, config.model.freeze) if config.model.freeze else None
    ledger = _ledger(config, rules, where)
    if rules.secure_aggregation:
        _check_secure(config, rules, ledger, where)
    dropout = "max_dropout" in rules.model_fields_set and (ledger is None or ledger.redraws is None)
    gated = config.gate.confidence is not None
    _refuse(
        where,
        (dropout, "deployment.max_dropout: is for private secure sums with Poisson sampling"),
        (
            not gated and config.privacy.gate_share is not None,
            "privacy.gate_share: set, but there is no gate (gate.confidence)",
        ),
    )
    if gated:
        _check_gate(config, rules, where)
    deployment = Deployment(
        config=config,
        rules=rules,
        folder=base / rules.state,
        trainable=trainable,
        data=data,
        meaning=meaning,
        learning=_learning(config, data),
        ledger=ledger,
        initial=_initial(given, trainable, config, f"{where}deployment.initial: {rules.initial}: "),
        freezing=freezing,
    )
    if deployment.acting is not trainable:  # the model in their files does not tell what to train
        learning = {**deployment.learning, "model": config.model.described}
        deployment = replace(deployment, learning=learning)
    try_policy(config, build_policy(config), data, deployment.acting)
    _check_algorithm(deployment, where)
    _ = deployment.aggregation  # refused now and not in round 1
    if rules.secure_aggregation:
        try:
            clip_share(deployment.sent_by_one(deployment.start()).size)
        except ValueError as problem:
            raise ConfigError(f"{where}deployment.secure_aggregation: {problem}") from None
    assert deployment.space  # makes a model for devices, which checks names, shapes and weights
    return deployment


@dataclass(frozen=True)
class _NamedFiles:
    """Reads the files that a configuration names, relative to its own folder."""

    base: Path
    where: str

    def read(self, key: str, name: str | None, parse: Callable[[Path], T]) -> T | None:
        """Parse a file, None without a name; refuse what `parse` cannot take.

        Pipes, devices and files without an end are never waited for.
        """
        if name is None:
            return None
        path = self.base / name
        try:
            return parse(path)
        except OSError as error:
            why = error.strerror
        except (ValueError, RecursionError, DataError) as error:
            why = str(error).partition("\n")[0]
        raise ConfigError(f"{self.where}deployment.{key}: {path}: {why}")


def _lines(path: Path) -> tuple[str, ...]:
    return tuple(line for line in read_small(path).decode().splitlines() if line)


def _encoder(path: Path) -> Encoder:
    """The encoder in the header of a data set."""
    try:
        return Encoder.from_json(read_object(path).get("encoder"))
    except ValueError as error:
        raise ValueError(f"not the header of a table's data: {error}") from None


def _model(path: Path) -> DeviceModel:
    return DeviceModel.from_bytes(read_packed(path))


def _over_actions(rules: Rules, files: _NamedFiles, where: str) -> dict[str, Any] | None:
    """Fixed actions, if any are named; contexts are columns, texts by a vocabulary, or dense."""
    actions, shape = rules.actions, rules.shape
    if actions is None:
        return None
    if isinstance(actions, str):
        actions = files.read("actions", actions, _lines)
    vocabulary = files.read("vocabulary", rules.vocabulary, _lines)
    encoder = files.read("encoder", rules.encoder, _encoder)
    found = {"actions": actions, "vocabulary": vocabulary, "encoder": encoder}
    if encoder is not None:
        fits = shape is None and (vocabulary is None) != (encoder.words > 0)
        goes = "deployment.encoder: goes with a vocabulary where it has words, and never a shape"
        _refuse(where, (not fits, goes))
        return {**found, "kind": "dense" if encoder.dense else "sparse", "shape": (encoder.width,)}
    give = "deployment.shape: give it for dense contexts, or deployment.vocabulary for texts"
    _refuse(where, ((vocabulary is None) == (shape is None), give))
    if vocabulary is not None:
        return {**found, "kind": "sparse", "shape": (len(vocabulary),)}
    return {**found, "kind": "dense", "shape": shape}


_MEANING = (
    "actions",
    "kind",
    "shape",
    "vocabulary",
    "encoder",
    "items",
    "item_encoder",
    "item_vocabulary",
    "catalogue",
)


def _over_candidates(rules: Rules, given: DeviceModel | None, where: str) -> dict[str, Any]:
    """Contexts, candidates and catalogue as those of the initial model."""
    named = [key for key in ("vocabulary", "encoder", "shape") if getattr(rules, key) is not None]
    _refuse(
        where,
        (
            given is None or given.items is None,
            "deployment.actions: missing; only over candidates there are none, and then"
            " deployment.initial has to be a model over candidates",
        ),
        (named, f"deployment.{' and '.join(named)}: over candidates deployment.initial says it"),
    )
    return {name: getattr(given, name) for name in _MEANING}


def _ledger(config: Config, rules: Rules, where: str) -> Ledger | None:
    """The accounting of a private deployment; None of one that is not."""
    asked, goal, name = config.clients_per_round, rules.report_goal, "deployment.report_goal"
    if config.privacy.mechanism == "none":
        private = "is for private deployments; use deployment.min_reports"
        _refuse(
            where,
            (goal is not None and goal > asked, f"{name}: more than the {asked} that are asked"),
            ("min_reach" in rules.model_fields_set, f"deployment.min_reach: {private}"),
        )
        return build_ledger(config, max(asked, rules.population or 1), False)
    _refuse(
        where,
        (
            rules.population is None,
            "deployment.population: missing; the privacy accounting of a deployment needs the"
            " number of devices",
        ),
        (
            goal is not None,
            f"{name}: in a private deployment it would let one device push another out of the"
            " round, which the noise does not cover",
        ),
    )
    assert rules.population is not None
    redraws = None
    if rules.secure_aggregation:
        connected = math.floor(rules.least_reach(private=True) * (1 - rules.max_dropout))
        redraws = Redraws(rules.min_reports, connected)
    return build_ledger(config, rules.population, False, deployed=True, secure=redraws)


def _check_secure(config: Config, rules: Rules, ledger: Ledger | None, where: str) -> None:
    """Refuse what secure sums cannot do, or would not hide."""
    assert Grid(STEP / RANGE, MODULUS) == SECURE
    asked, goal = config.clients_per_round, rules.report_goal
    if ledger is not None:
        tolerance, noise = ledger.tolerance, ledger.plan.noise_multiplier
        excess = 1.0 if tolerance is None else tolerance.excess(asked)
        what = f"{asked} updates with noise of {noise:g} clip norms do not fit into one secure sum"
        full = room_needed(ledger.plan, excess) * LEVELS > MODULUS
        _refuse(where, (full, f"privacy.noise_multiplier: {what}"))
    _refuse(
        where,
        (
            config.aggregation.name != "mean",
            f"aggregation.name: {config.aggregation.name} needs single updates, and with"
            " deployment.secure_aggregation the server sees sums only",
        ),
        (asked > MOST, f"clients_per_round: at most {MOST} devices fit into one secure sum"),
        (
            rules.min_reports < LEAST,
            f"deployment.min_reports: a secure sum needs at least {LEAST} devices to hide one",
        ),
        (
            goal is not None and goal < rules.secure_threshold * asked,
            f"deployment.report_goal: {rules.secure_threshold:g} of the devices"
            " (deployment.secure_threshold) have to stay until the end, so a round cannot end at"
            " fewer",
        ),
    )


def _check_gate(config: Config, rules: Rules, where: str) -> None:
    """Refuse a gate that could not decide, or that one device could own."""
    private, gate = config.privacy.mechanism != "none", config.gate
    reason = why_impossible(build_policy(config), private=False)
    least = max(LEAST_JUDGES, rules.min_reports)
    _refuse(
        where,
        (
            private and config.privacy.gate_share is None,
            "privacy.gate_share: missing; the gate of a private deployment decides by sums with"
            " noise, and a part of the budget has to pay for them, such as 0.1",
        ),
        (reason, f"gate: {reason}"),
        (
            private and "clients" in gate.model_fields_set,
            "gate.clients: under privacy the round's own devices judge, in their own turn",
        ),
        (
            rules.secure_aggregation,
            "gate: not with deployment.secure_aggregation: it asks for sums of single devices",
        ),
        (
            gate.limit is None,
            "gate.limit: missing; without it one device could claim a gain of any size",
        ),
        (
            not private and gate.clients < least,
            f"gate.clients: at least {least} devices have to judge, or no model would ever pass",
        ),
    )


def _learning(config: Config, data: DataSpec) -> dict[str, Any]:
    policy = build_policy(config)
    if (
        (hasattr(policy, "at") or data.items is not None)
        and config.objective.name.startswith("weighted")
        and not config.objective.parameters
    ):
        raise ConfigError(
            "objective.scale: missing; the rule changes with every deployment or its candidates,"
            " and so would its own scale"
        )
    objective, parameters = build_objective(
        config, lambda: importance_scale(policy, data.num_actions)
    )
    if hasattr(objective, "targets") or getattr(objective, "supervised", False):
        raise ConfigError(
            f"objective.name: {config.objective.name} needs rewards of actions that devices do"
            " not log"
        )
    client = {key: getattr(config.client, key) for key in ("learning_rate", "batch_size", "epochs")}
    return {
        "objective": config.objective.name,
        "objective_parameters": parameters,
        "client": client,
        "dtype": config.dtype,
        "algorithm": {"name": config.algorithm.name, **config.algorithm.parameters},
        "freeze": list(config.model.freeze),
    }


def _check_algorithm(deployment: Deployment, where: str) -> None:
    """Refuse by name what a deployment cannot do yet, before any device is asked."""
    config, algorithm = deployment.config, deployment.algorithm
    check_personal(config, algorithm)
    broadcast = algorithm.broadcast(deployment.kept(deployment.initial))
    _refuse(
        where,
        (
            list(broadcast) != ["weights"],
            f"algorithm.name: {config.algorithm.name} broadcasts more than the weights, which"
            " devices do not take yet",
        ),
        (
            not math.isfinite(build_clipping(config, algorithm).initial),
            "clipping.norm: missing; it bounds what one device can claim",
        ),
        (
            config.compression.name != "none",
            "compression.name: devices do not compress their updates yet",
        ),
    )


def _initial(
    given: DeviceModel | None, trainable: Trainable, config: Config, where: str
) -> np.ndarray:
    """The weights that training starts from: those of the model given, or the seed's."""
    dtype, layout = np.dtype(config.dtype), trainable.layout
    if given is None:
        return trainable.initial(config.seed, dtype)
    expected = dict(layout.shapes)  # a deployed model may have more arrays than these
    found = {name: array.shape for name, array in given.weights.items() if name in expected}
    _refuse(
        where,
        (
            found != expected,
            f"its weights do not fit a model of {layout.size} parameters",
        ),
        (
            given.items is not None and _differ(given.model, config.model.described),
            "its model section differs from [model] here",
        ),
    )
    return layout.flatten(dict(given.weights), dtype)


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two models of one name have other parameters: their weights mean other features."""
    return one["name"] == other["name"] and dict(one) != dict(other)
