"""From one TOML file to the parts of a deployment: the sections of a simulation, and `[deployment]` for the rest.

Whatever does not fit together, or has no meaning on real devices, is refused here with the path of its key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbandit.building.parts import build_clipping, build_objective, build_optimizer, build_policy
from fedbandit.building.privacy import build_ledger
from fedbandit.config import Config, Count, Positive, read_toml
from fedbandit.core.errors import ConfigError
from fedbandit.deploy.device.model_files import DeviceModel
from fedbandit.deploy.secure_sums import LEAST, MOST, MOST_EVENTS, ReportBounds
from fedbandit.evaluation.gate import why_impossible
from fedbandit.federated.server import PlainMean, Stepping
from fedbandit.federated.state import State
from fedbandit.models import DataSpec, Layout, Model, build_model
from fedbandit.objectives import DoublyRobust
from fedbandit.policies import importance_scale
from fedbandit.privacy.accounting import Ledger
from fedbandit.privacy.noise import DeploymentNoise, PrivateMean

_MEANINGLESS = ("scenario", "mode", "data", "pretraining", "population", "drift", "training", "evaluate_every")
LEAST_JUDGES = 3  # devices that judge a candidate: without any one of them two must be left


class Rules(BaseModel):
    """The `[deployment]` section. Paths are relative to the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state: str  # folder of checkpoints, metrics and models
    actions: tuple[str, ...] | str  # their names, or a text file with one a line
    vocabulary: str | None = None  # a text file with one word a line, for contexts that are texts
    shape: tuple[Count, ...] | None = None  # of contexts that are dense features
    initial: str | None = None  # a model file to start from
    population: Count | None = None  # devices that may ever take part: what the privacy accounting counts on
    report_goal: Count | None = None  # reports that end a round early; None: wait for all that were asked
    min_reports: Count = 1  # fewer, and the round is run again; also the nodes to wait for before one begins
    round_seconds: Positive = 120.0
    install_seconds: Positive = 60.0  # how long a new model may take to reach the nodes before the round begins
    poll_seconds: Positive = 0.2
    keep_versions: Annotated[int, Field(ge=2)] = 5
    secure_aggregation: bool = False  # the server sees sums only; the rest is for this
    secure_seconds: Positive = 60.0  # for each exchange of keys; training has round_seconds
    secure_shares: Annotated[int, Field(ge=LEAST)] = 25  # devices that keep a share of one device's secrets
    secure_threshold: Annotated[float, Field(gt=0.5, le=1)] = 0.6  # the part of them that has to stay until the end
    max_events: Annotated[int, Field(ge=1, le=MOST_EVENTS)] = 1000  # that one device reports in one round
    max_reward: Positive = 1.0  # larger ones are counted as this; these two are also for the gate

    @property
    def bounds(self) -> ReportBounds:
        return ReportBounds(self.max_events, self.max_reward)


@dataclass(frozen=True)
class Deployment:
    """All that stays the same from round to round."""

    config: Config
    rules: Rules
    folder: Path
    model: Model
    layout: Layout
    actions: tuple[str, ...]
    data: DataSpec
    vocabulary: tuple[str, ...] | None
    learning: dict[str, Any]  # what devices receive about how to train
    ledger: Ledger | None
    initial: np.ndarray

    @property
    def rounds(self) -> int:
        return self.config.rounds if self.ledger is None else self.ledger.last_round

    def device_model(self, weights: np.ndarray, version: int) -> DeviceModel:
        """Flat weights as the model that devices act with."""
        return DeviceModel(
            version=version,
            weights=self.layout.split(weights),
            actions=self.actions,
            kind=self.data.kind,
            shape=self.data.shape,
            policy=self.config.policy.model_dump(),
            model=self.config.model.model_dump(),
            vocabulary=self.vocabulary,
        )

    def stepping(self, noise: DeploymentNoise | None) -> Stepping:
        """The server's step, with the noise of a private deployment."""
        chosen = self.config.server
        optimizer = build_optimizer("server.optimizer", chosen.optimizer, chosen.parameters)
        if self.ledger is None:
            return Stepping(optimizer, build_clipping(self.config), PlainMean())
        assert noise is not None
        return Stepping(optimizer, build_clipping(self.config), PrivateMean(self.ledger.plan, noise, self.ledger))

    def start(self) -> State:
        """The state before the first round: the initial model is version 0."""
        stepping = self.stepping(None if self.ledger is None else DeploymentNoise(self.ledger.plan.strategy))
        return State(
            round=0,
            weights=self.initial,
            deployed={0: self.initial},
            optimizer=stepping.optimizer.init(self.initial),
            clip_norm=stepping.clipping.initial,
            extra={"promises": self.promises(), "versions": [{"version": 0, "round": 0, "why": "the initial model"}]},
        )

    @cached_property
    def space(self) -> str:
        """Names what contexts and actions mean to this deployment's devices."""
        return self.device_model(self.initial, 0).space

    def promises(self) -> dict[str, Any]:
        """What must not change while a deployment lives: what weights mean, and what its devices were promised."""
        return {
            "actions and features": self.space,
            "model": self.config.model.model_dump(),
            "dtype": self.config.dtype,
            "privacy": None if self.ledger is None else repr(self.ledger.plan),
            "secure aggregation": self.rules.secure_aggregation or None,
        }

    def check_same(self, state: State) -> None:
        """Refuse to resume from a state with other promises."""
        for name, value in self.promises().items():
            if state.extra["promises"].get(name) != value:
                raise ConfigError(
                    f"deployment.state: {self.folder}: was started with different {name}; use a new folder"
                )


def read_deployment(path: Path) -> Deployment:
    """The deployment that a TOML file describes."""
    return build_deployment(read_toml(path), path.resolve().parent, f"{path}: ")


def build_deployment(values: Mapping[str, Any], base: Path, where: str = "") -> Deployment:
    """The deployment of nested values as TOML gives them; its paths are relative to `base`."""
    for key in _MEANINGLESS:
        if key in values:
            raise ConfigError(f"{where}{key}: is for simulations; it has no meaning on real devices")
    rest = {key: value for key, value in values.items() if key != "deployment"}
    config = Config.build({"scenario": "scratch", **rest}, where)
    rules = _rules(values.get("deployment", {}), where)
    if not config.clipping.enabled:
        raise ConfigError(f"{where}clipping.enabled: without a clip norm one device could move the model at will")
    actions = _lines("deployment.actions", rules.actions, base) if isinstance(rules.actions, str) else rules.actions
    vocabulary = None if rules.vocabulary is None else _lines("deployment.vocabulary", rules.vocabulary, base)
    if (vocabulary is None) == (rules.shape is None):
        raise ConfigError(f"{where}deployment.shape: give it for dense contexts, or deployment.vocabulary for texts")
    if vocabulary is not None:
        data = DataSpec("sparse", (len(vocabulary),), len(actions))
    else:
        assert rules.shape is not None
        data = DataSpec("dense", rules.shape, len(actions))
    model = build_model(config.model.name, data, config.model.parameters)
    weights = model.init(config.seed)
    layout = Layout.of(weights)
    ledger = _ledger(config, rules, where)
    if rules.secure_aggregation:
        _check_secure(config, rules, where)
    if config.gate.confidence is not None:
        _check_gate(config, rules, where)
    deployment = Deployment(
        config=config,
        rules=rules,
        folder=base / rules.state,
        model=model,
        layout=layout,
        actions=tuple(actions),
        data=data,
        vocabulary=vocabulary,
        learning=_learning(config, len(actions)),
        ledger=ledger,
        initial=_initial(rules, base, layout, weights, np.dtype(config.dtype)),
    )
    assert deployment.space  # makes a model for devices, which checks names, shapes and weights
    return deployment


def _rules(values: Mapping[str, Any], where: str) -> Rules:
    try:
        return Rules.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        path = ".".join(["deployment", *(str(part) for part in problem["loc"])])
        raise ConfigError(f"{where}{path}: {problem['msg'].lower()}") from None


def _lines(key: str, name: str, base: Path) -> tuple[str, ...]:
    try:
        return tuple(line for line in (base / name).read_text(encoding="utf-8").splitlines() if line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {base / name}: {error}") from None


def _ledger(config: Config, rules: Rules, where: str) -> Ledger | None:
    if config.privacy.mechanism == "none":
        if rules.report_goal is not None and rules.report_goal > config.clients_per_round:
            raise ConfigError(f"{where}deployment.report_goal: more than the {config.clients_per_round} that are asked")
        return build_ledger(config, max(config.clients_per_round, rules.population or 1), False)
    if rules.population is None:
        raise ConfigError(
            f"{where}deployment.population: missing; the privacy accounting of a deployment needs the number of devices"
        )
    if rules.report_goal is not None:
        raise ConfigError(
            f"{where}deployment.report_goal: in a private deployment it would let one device push another out of the"
            " round, which the noise does not cover"
        )
    return build_ledger(config, rules.population, False)


def _check_secure(config: Config, rules: Rules, where: str) -> None:
    if config.privacy.mechanism != "none":
        raise ConfigError(
            f"{where}deployment.secure_aggregation: not with privacy.mechanism = {config.privacy.mechanism!r}: a sum of"
            " too few devices is dropped, so one device more or less could decide whether the others are revealed,"
            " which the noise does not cover"
        )
    if config.clients_per_round > MOST:
        raise ConfigError(f"{where}clients_per_round: at most {MOST} devices fit into one secure sum")
    if rules.min_reports < LEAST:
        raise ConfigError(f"{where}deployment.min_reports: a secure sum needs at least {LEAST} devices to hide one")
    if rules.report_goal is not None and rules.report_goal < rules.secure_threshold * config.clients_per_round:
        raise ConfigError(
            f"{where}deployment.report_goal: {rules.secure_threshold:g} of the devices (deployment.secure_threshold)"
            " have to stay until the end, so a round cannot end at fewer"
        )


def _check_gate(config: Config, rules: Rules, where: str) -> None:
    if reason := why_impossible(build_policy(config), private=config.privacy.mechanism != "none"):
        raise ConfigError(f"{where}gate: {reason}")
    if rules.secure_aggregation:
        raise ConfigError(f"{where}gate: not with deployment.secure_aggregation: it asks for sums of single devices")
    if config.gate.limit is None:
        raise ConfigError(f"{where}gate.limit: missing; without it one device could claim a gain of any size")
    if config.gate.clients < (least := max(LEAST_JUDGES, rules.min_reports)):
        raise ConfigError(f"{where}gate.clients: at least {least} devices have to judge, or no model would ever pass")


def _learning(config: Config, num_actions: int) -> dict[str, Any]:
    objective, parameters = build_objective(
        config, lambda: importance_scale(build_policy(config, num_actions), num_actions)
    )
    if isinstance(objective, DoublyRobust) or getattr(objective, "supervised", False):
        raise ConfigError(f"objective.name: {config.objective.name} needs rewards of actions that devices do not log")
    client = {key: getattr(config.client, key) for key in ("learning_rate", "batch_size", "epochs")}
    return {
        "objective": config.objective.name,
        "objective_parameters": parameters,
        "client": client,
        "dtype": config.dtype,
    }


def _initial(rules: Rules, base: Path, layout: Layout, weights: dict[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
    if rules.initial is None:
        return layout.flatten(weights, dtype)
    path = base / rules.initial
    try:
        given = DeviceModel.from_bytes(path.read_bytes(), str(path)).weights
    except OSError as error:
        raise ConfigError(f"deployment.initial: {path}: {error.strerror}") from None
    expected = dict(layout.shapes)
    if {name: tuple(array.shape) for name, array in given.items()} != expected:
        parameters = sum(prod(shape) for shape in expected.values())
        raise ConfigError(f"deployment.initial: {path}: its weights do not fit a model of {parameters} parameters")
    return layout.flatten(dict(given), dtype)
