"""The configuration of a run as one typed tree. Frozen, refuses unknown keys, checked before any
work starts.

The names are the ones users type, in TOML and with `--set`.
"""

import importlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedbandit.core.errors import ConfigError
from fedbandit.core.files import parse_toml, read_small
from fedbandit.core.identity import settings_of_results
from fedbandit.core.parts import check_keys, nearest, resolve

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# Sections that name a part: the key of its name, where the built-in ones are, and arguments that
# come from elsewhere.
PARTS = (
    ("environment", "name", "fedbandit.environments", 2),
    ("policy", "name", "fedbandit.policies", 0),
    ("objective", "name", "fedbandit.objectives", 0),
    ("model", "name", "fedbandit.models", 1),
    ("server", "optimizer", "fedbandit.federated.server", 0),
    ("algorithm", "name", "fedbandit.algorithms", 1),
    ("compression", "name", "fedbandit.compression", 0),
    ("aggregation", "name", "fedbandit.federated.robust", 0),
)
_RATES = (
    "client.learning_rate",
    "server.learning_rate",
    "pretraining.client_learning_rate",
    "pretraining.server_learning_rate",
)


def _is_plain(value: Any) -> bool:
    """Whether TOML and JSON both know it."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    return value is None or isinstance(value, bool | int | float | str)


class _Section(BaseModel):
    """A section that refuses keys it does not know, and values of other types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _OpenSection(BaseModel):
    """A section that names a part; further keys are its parameters, checked when it is built."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _can_be_kept(self) -> "_OpenSection":
        for key, value in self.parameters.items():
            if not _is_plain(value):
                raise ValueError(
                    f"{key} should be a number, a text, true or false, or a list or table of these"
                )
        return self


class DataConfig(_Section):
    """Where the examples come from."""

    source: str = "topics"
    # Further files that the run depends on, such as those that a part of a user's own reads.
    files: Annotated[tuple[str, ...], Field(strict=False)] = ()


class ModelConfig(_OpenSection):
    """The model: linear, mlp, cnn or an import path; further keys are its own parameters."""

    name: str = "linear"
    freeze: Annotated[
        tuple[str, ...], Field(strict=False)
    ] = ()  # parameters that the bandit phase does not train

    @property
    def described(self) -> dict[str, Any]:
        """Name and parameters: what makes the model."""
        return {"name": self.name, **self.parameters}


class EnvironmentConfig(_OpenSection):
    """The world that pays for actions; further keys are its own parameters (`noise`, ...)."""

    name: str = "labels"
    missing: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of rewards that never arrive
    delay: Annotated[int, Field(ge=0)] = 0  # periods until a reward arrives, in population mode

    @property
    def described(self) -> dict[str, Any]:
        """Name and parameters: what makes the environment."""
        return {"environment": self.name, **self.parameters}


class PolicyConfig(_OpenSection):
    """The exploration rule; further keys are its own parameters (`beta`, `epsilon`,
    `floor`, ...).
    """

    name: str = "softmax"


class ObjectiveConfig(_OpenSection):
    """The loss on logged feedback; further keys are its own parameters (`scale`, ...)."""

    name: str = "regression"


class ClientConfig(_Section):
    """Local training."""

    learning_rate: Positive = 0.1
    batch_size: Count = 16
    epochs: Count = 1
    max_examples: Count | None = None


class ServerConfig(_OpenSection):
    """The server's optimiser; further keys are its own parameters (`momentum`, `epsilon`, ...)."""

    optimizer: str = "adam"
    learning_rate: Positive = 0.01

    @property
    def parameters(self) -> dict[str, Any]:
        return {"learning_rate": self.learning_rate, **super().parameters}


class AlgorithmConfig(_OpenSection):
    """The federated algorithm; further keys are its own parameters (`mu`, ...)."""

    name: str = "fedavg"
    memory_limit: Count = (
        8_000_000_000  # bytes that all clients' memory may take, for algorithms that have one
    )


class CompressionConfig(_OpenSection):
    """Compression of clients' updates; further keys are its own parameters (`bits`,
    `fraction`, ...).
    """

    name: str = "none"


class AggregationConfig(_OpenSection):
    """Aggregation of the clients' updates; further keys are the rule's own parameters
    (`trim`, ...).
    """

    name: str = "mean"
    memory_limit: Count = (
        8_000_000_000  # bytes that a round's updates may take, for rules that need them one by one
    )


class ClippingConfig(_Section):
    """Adaptive at a quantile, or fixed at a norm; `enabled = false` for none."""

    enabled: bool = True
    norm: Positive | None = None
    quantile: Fraction | None = None
    initial: Positive | None = None  # of an adaptive norm; 1.0, and 0.1 in private runs
    rate: Annotated[float, Field(gt=0, le=10)] = 0.2

    @model_validator(mode="after")
    def _one_way(self) -> "ClippingConfig":
        if self.norm is not None and self.quantile is not None:
            raise ValueError("either norm (fixed) or quantile (adaptive), not both")
        return self


class PretrainingConfig(_Section):
    """Supervised pre-training in the `init` scenarios. What is not set, or "same", is as in the
    bandit phase.
    """

    rounds: Count = 100
    clients: Count = 100
    clients_per_round: Count | Literal["same"] = "same"  # all of its clients where they are fewer
    max_examples: Count | Literal["same", "all"] = "same"  # of a client, each time it takes part
    clip_norm: Positive | Literal["same", "none", "adaptive"] = (
        "same"  # a fixed norm, or how it is found
    )
    seed: Seed = 0
    objective: Literal["full-information", "full-information-cross-entropy"] = "full-information"
    reduction: Literal["mean", "half-sum"] = "mean"  # of the loss over a mini-batch
    client_learning_rate: Positive | None = None
    server_learning_rate: Positive | None = None
    server_optimizer: str | None = None


class PopulationConfig(_Section):
    """Clients in population mode (`mode = "population"`)."""

    events_per_period: Count = 64
    cache_size: Count = 256
    pull_probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    longest_lag: Count = 8


class PrivacyConfig(_Section):
    """Differential privacy for clients. The clip norm is that of `[clipping]`; there is no
    other.
    """

    mechanism: Literal["none", "dp-fedavg", "dp-ftrl", "banded-mf", "blt", "best"] = "none"
    noise_multiplier: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    epsilon: Positive | None = (
        None  # a budget: sets the noise where it is not given, and where the run stops
    )
    delta: Fraction = 1e-6
    accountant: Literal["rdp", "pld"] = "rdp"  # of the budget
    # None: what suits the mechanism
    sampling: Literal["poisson", "cyclic-poisson", "fixed", "min-separation"] | None = None
    separation: Count | None = (
        None  # rounds between two turns of a client; None: as many as the clients allow
    )
    bands: Count | None = None  # of banded-mf; None: 32, or the separation where that is less
    buffers: Annotated[int, Field(ge=1, le=8)] | None = None  # of blt; None: 3
    restart_at_deployments: bool = False
    # Of a simulation, where a deployment's is the operating system's; "devices": they add it
    # themselves, inside a secure sum.
    noise: Literal["seed", "system", "devices"] = "seed"
    # With noise = "devices", the parts of a round's devices that may drop out and that may work
    # with the server; None: 0.2 and 0.1.
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    colluders: Annotated[float, Field(ge=0, lt=1)] | None = None
    pretraining: Literal["public", "accounted"] | None = None
    # Of deployments: parts of the budget that pay for noised figures and for the gate; None: there
    # are none.
    figures_share: Fraction | None = None
    gate_share: Fraction | None = None
    unit: Literal["client", "user"] | None = (
        None  # of deployments: who is protected; None: a client, which is a device
    )


class DriftConfig(_Section):
    """The change in the `drift` scenario, and before which rounds."""

    kind: Literal["permute", "appear", "rotate"] = "permute"
    at: Annotated[tuple[Count, ...], Field(strict=False)] = ()  # a list, in TOML
    start: Literal["scratch", "init"] = "scratch"
    fraction: Annotated[float, Field(gt=0, le=1)] = (
        0.5  # of the actions: permuted at each change, or missing at first
    )
    groups: Annotated[int, Field(ge=2)] = 4  # of users, whose preferences rotate
    disliked: Annotated[float, Field(ge=0, lt=1)] = (
        0.25  # what a right answer pays a user who does not care for it
    )
    seed: Seed = 0


class GateConfig(_Section):
    """When a new model may be deployed. Without a confidence there is no gate."""

    confidence: Annotated[float, Field(ge=0.5, lt=1)] | None = (
        None  # that the new model is not worse
    )
    estimator: Literal["ips", "dr"] = "dr"
    clients: Count = 64  # asked for their logs' sums at each deployment
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = (
        0.0  # how much worse, per event, is still good enough
    )
    limit: Positive | None = None  # cuts 1/propensity, for less variance and some bias


class Config(_Section):
    """Everything that a run can be told, frozen and checked when it is made.

    Examples:
        >>> config = Config.build({"rounds": 50, "policy": {"name": "softmax", "beta": 0.1}})
        >>> config.rounds, config.policy.name, config.policy.parameters
        (50, 'softmax', {'beta': 0.1})
        >>> config.with_values({"policy.beta": 0.02, "seed": 3}).policy.parameters
        {'beta': 0.02}
        >>> config.with_values({"client.epoch": 1})
        Traceback (most recent call last):
        fedbandit.core.errors.ConfigError: client.epoch: unknown key; did you mean epochs?
    """

    scenario: str = "init-shift"
    mode: Literal["simple", "population"] = "simple"
    rounds: Count = 1500
    deploy_every: Count = 200
    clients_per_round: Count = 64
    seed: Seed = 0
    training: bool = True
    evaluate_every: Count | None = None
    dtype: Literal["float32", "float64"] = "float32"
    threads: Count | Literal["auto"] = "auto"
    engine: Literal["threads", "ray"] = "threads"
    device: str = "cpu"
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    model: ModelConfig = ModelConfig()
    policy: PolicyConfig = PolicyConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    client: ClientConfig = ClientConfig()
    server: ServerConfig = ServerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    compression: CompressionConfig = CompressionConfig()
    aggregation: AggregationConfig = AggregationConfig()
    clipping: ClippingConfig = ClippingConfig()
    pretraining: PretrainingConfig = PretrainingConfig()
    population: PopulationConfig = PopulationConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    drift: DriftConfig = DriftConfig()
    gate: GateConfig = GateConfig()

    @model_validator(mode="after")
    def _rates_fit(self) -> "Config":
        for path in _RATES:
            section, _, key = path.partition(".")
            rate = getattr(getattr(self, section), key)
            if rate is not None and rate > float(np.finfo(self.dtype).max):
                raise ValueError(f"{path}: {rate:g} is too large for {self.dtype}")
        return self

    @classmethod
    def build(cls, values: Mapping[str, Any], where: str = "") -> "Config":
        """From nested values, as TOML gives them; a wrong one is refused with its path."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{where}{_first_problem(error)}") from None

    @classmethod
    def from_toml(cls, path: Path) -> "Config":
        """The configuration in a TOML file; what is wrong in it is refused with the file and the
        line.
        """
        values = read_toml(path)
        try:
            config = cls.build(values)
            _check_parts(config, set(values))
        except ConfigError as error:
            line = _line_of(str(error).partition(":")[0], path.read_text(encoding="utf-8"))
            raise ConfigError(
                f"{path}{'' if line is None else f', line {line}'}: {error}"
            ) from None
        return config

    def with_values(self, settings: Mapping[str, Any]) -> "Config":
        """A copy with dotted keys set, in any order: `config.with_values({"policy.beta": 0.1})`."""
        if all(settings.get(f"clipping.{way}") is not None for way in ("norm", "quantile")):
            raise ConfigError("clipping: either norm (fixed) or quantile (adaptive), not both")
        values = self.model_dump()
        # A new name takes the old one's parameters away, so it must not come after those that
        # belong to it.
        for key in sorted(settings, key=lambda key: not key.endswith((".name", ".optimizer"))):
            values = _set(values, key, settings[key])
        changed = Config.build(values)
        _check_parts(changed, {key.partition(".")[0] for key in settings})
        # Sections are frozen: those that stayed the same are shared, which sweeps live on.
        same = {key: old for key, old in self if old == getattr(changed, key)}
        return changed.model_copy(update=same)

    def identity(self) -> dict[str, Any]:
        """The values that identify a run: everything but where it is computed."""
        return settings_of_results(self.model_dump())

    def part_names(self) -> list[str]:
        """The names of all parts, built in or import paths: whatever code of a user's own a run
        executes.
        """
        named = [getattr(getattr(self, section), key) for section, key, _, _ in PARTS]
        return [*named, self.scenario, self.pretraining.server_optimizer or self.server.optimizer]

    def part(self, section: str) -> tuple[str, Any, dict[str, Any]]:
        """The part that a section names: the key of its name, what makes it, and its parameters."""
        key, module = next(one[1:3] for one in PARTS if one[0] == section)
        chosen, path = getattr(self, section), f"{section}.{key}"
        built_in = importlib.import_module(module).BUILT_IN
        return path, resolve(path, getattr(chosen, key), built_in), chosen.parameters

    def to_toml(self) -> str:
        """The whole configuration, defaults included, as TOML."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


def _check_parts(config: Config, sections: set[str]) -> None:
    """Refuse unknown names and parameters of built-in parts in these sections; a user's own part
    checks its own.
    """
    for section, key, module, leading in PARTS:
        chosen = getattr(config, section)
        if section not in sections or ":" in getattr(chosen, key):  # who builds it imports it
            continue
        _, make, parameters = config.part(section)
        around = ("alpha", "floor") if section == "policy" else ()  # go with every built-in rule
        check_keys(
            section,
            make,
            [key for key in parameters if key not in around],
            leading,
            beside=[*type(chosen).model_fields, *around],
            others=importlib.import_module(module).BUILT_IN,
        )


def _line_of(key: str, text: str) -> int | None:
    """Where a dotted key is set in a TOML file: in its section, or in a table on one line; None if
    it is not plain.
    """
    section, last = "", key.rpartition(".")[2]
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line):
            section = header.group(1)
            if section == key:
                return number
        elif named := re.match(r"\s*([\w.-]+)\s*=", line):
            path = f"{section}.{named.group(1)}".lstrip(".")
            if path == key or (
                key.startswith(f"{path}.") and re.search(rf"\b{re.escape(last)}\s*=", line)
            ):
                return number
    return None


def read_toml(path: Path) -> dict[str, Any]:
    """The values in a TOML file, not yet checked."""
    try:
        return parse_toml(read_small(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """`key=value` words from a command line; values are read as TOML, and as plain text where they
    are not TOML.
    """
    parsed = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"--set {setting}: expected key=value, for example --set policy.beta=0.1"
            )
        try:
            parsed[key.strip()] = parse_toml(f"value = {text}".encode())["value"]
        except tomllib.TOMLDecodeError:
            parsed[key.strip()] = text
        except ValueError as error:
            raise ConfigError(f"--set {key.strip()}: {error}") from None
    return parsed


def _set(values: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """The values with one dotted key set; a new name drops the parameters of the old one."""
    key, _, rest = dotted.partition(".")
    if not rest:
        return {**values, key: value}
    inner = values.get(key, {})
    if not isinstance(inner, dict):
        raise ConfigError(f"{dotted}: {key} is a single value, not a section")
    inner = _set(inner, rest, value)
    if rest in ("name", "optimizer") and values.get(key, {}).get(rest) != value:
        inner = {
            rest: value,
            **({"learning_rate": inner["learning_rate"]} if "learning_rate" in inner else {}),
        }
    if key == "clipping" and rest in ("norm", "quantile"):  # one replaces the other
        inner = {k: v for k, v in inner.items() if k == rest or k not in ("norm", "quantile")}
    return {**values, key: inner}


def _first_problem(error: ValidationError) -> str:
    """The first thing that pydantic has found wrong, in the words of a user."""
    problems = error.errors()
    first = problems[0]
    path, beside = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{path}: unknown key{nearest(path.rpartition('.')[2], beside)}"
    if first["type"] == "model_type":
        return f"{path}: should be a section with keys of its own, not {first['input']!r}"
    if first["type"] in ("tuple_type", "list_type"):
        return f"{path}: should be a list, such as {[first['input']]!r}, not {first['input']!r}"
    if first["type"] == "value_error":
        return f"{path}: ".removeprefix(": ") + first["msg"].removeprefix(
            "Value error, "
        )  # of the whole: no path
    alike = dict.fromkeys(
        p["msg"].removeprefix("Input should be ") for p in problems if _path(p["loc"])[0] == path
    )
    return f"{path}: should be {' or '.join(alike)}, not {first['input']!r}"


def _path(location: tuple[int | str, ...]) -> tuple[str, list[str]]:
    """The key as a user types it, and the keys that its section knows.

    Pydantic appends the kinds of value that it tried to the location.
    """
    model: Any = Config
    parts, beside = [], list(Config.model_fields)
    for part in location:
        if isinstance(part, int):
            parts.append(str(part))
        elif isinstance(model, type) and issubclass(model, BaseModel):
            parts.append(part)
            beside = list(model.model_fields)
            model = model.model_fields[part].annotation if part in model.model_fields else None
    return ".".join(parts), beside
