"""`fedbandit evaluate` as a function: a log, a policy, and what the estimators say. Knows nothing of the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbandit.components import resolve
from fedbandit.data.dataset import FederatedDataset, Header, Split
from fedbandit.errors import ConfigError
from fedbandit.evaluation.ope import (
    Bernstein,
    Bootstrap,
    Clipped,
    Estimate,
    Plain,
    Records,
    Shrunk,
    Weighting,
    estimate,
)
from fedbandit.evaluation.ope.action_means import action_means
from fedbandit.evaluation.ope.estimators import BUILT_IN, NEEDS_MODEL, Estimator
from fedbandit.evaluation.ope.linear_rewards import linear_rewards
from fedbandit.evaluation.ope.logs import RowScores, log_of, records_for, records_of
from fedbandit.evaluation.scoring import load_scorer
from fedbandit.evaluation.tables import LogColumns, read_log_table
from fedbandit.evaluation.targets import looks_at_scores, target_policy


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to evaluate and how; the names are those of the command line's options."""

    policy: str = "uniform"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    model: Path | None = None  # whose scores the policy looks at
    reward_model: str = "auto"  # linear in contexts where there are any, actions (each one's mean), or a model's path
    estimators: Sequence[str] = ()  # none: all that can be computed
    clip: float | None = None
    shrink: float | None = None
    confidence: float = 0.95
    interval: Literal["bootstrap", "bernstein"] = "bootstrap"
    reward_range: tuple[float, float] | None = None
    floor: float | None = None  # the smallest propensity that the logging policy ever has
    replicates: int = 1000
    seed: int = 0
    split: Literal["train", "test"] = "train"
    columns: LogColumns = field(default_factory=LogColumns)

    @property
    def weighting(self) -> Weighting:
        if self.clip is not None and self.shrink is not None:
            raise ConfigError("clip, shrink: give one of them")
        try:
            if self.clip is not None:
                return Clipped(self.clip)
            return Plain() if self.shrink is None else Shrunk(self.shrink)
        except ValueError as error:
            raise ConfigError(f"{'shrink' if self.clip is None else 'clip'}: {error}") from None


@dataclass(frozen=True)
class Evaluation:
    """What came of it, beside what the log itself earned."""

    estimates: dict[str, Estimate]
    logged_reward: float  # the mean reward of the logging policy, as logged
    notes: tuple[str, ...] = ()


def evaluate_logs(logs: Path | FederatedDataset, request: Request) -> Evaluation:
    """Evaluate a policy on a table of decisions, or on a data set made by `fedbandit data import logged`."""
    if isinstance(logs, Path) and not logs.is_dir():
        records = _table_records(logs, request)
    else:
        dataset = FederatedDataset.open(logs) if isinstance(logs, Path) else logs
        records = _dataset_records(dataset, request)
    if not len(records):
        raise ConfigError("split: holds no events")
    chosen = _estimators(request, records)
    bernstein, notes = _bernstein(request, records)
    estimates = estimate(
        records,
        chosen,
        confidence=request.confidence,
        weighting=request.weighting,
        bootstrap=Bootstrap(request.replicates, request.seed),
        bernstein=bernstein,
    )
    if "dm" in estimates:
        notes.append("the interval of dm leaves out how wrong the reward model may be")
    return Evaluation(estimates, float(records.rewards.mean()), tuple(notes))


def _table_records(path: Path, request: Request) -> Records:
    table = read_log_table(path, request.columns)
    if table.target is not None:
        return records_for(table.split, table.target)
    policy = target_policy(request.policy, request.parameters, table.actions)
    if looks_at_scores(request.policy) or request.model is not None:
        raise ConfigError(
            "policy: a model's policy needs contexts; import the table with `fedbandit data import logged`,"
            " or give --target, a column with the policy's probabilities"
        )
    k = len(table.actions)
    return records_of(table.split, policy, k, rewards=_rewards(table.split, None, k, request))


def _dataset_records(dataset: FederatedDataset, request: Request) -> Records:
    split, header = dataset.train if request.split == "train" else dataset.test, dataset.header
    if split is None:
        raise ConfigError(f"split: {header.name} has no test split")
    log_of(split)
    policy = target_policy(request.policy, request.parameters, header.actions)
    scores = None
    if looks_at_scores(request.policy):
        if request.model is None:
            raise ConfigError(
                f"model: {request.policy} needs a model's scores; give --model, a run folder or model file"
            )
        scores = load_scorer(request.model, header).on(split)
    return records_of(split, policy, header.num_actions, scores, _rewards(split, header, header.num_actions, request))


def _rewards(split: Split, header: Header | None, num_actions: int, request: Request) -> RowScores:
    if request.reward_model in ("auto", "linear"):
        fitted = linear_rewards(split, num_actions)
        if fitted is not None:
            return fitted
        if request.reward_model == "linear":
            raise ConfigError("reward_model: linear needs contexts; `fedbandit data import logged` reads them")
    if request.reward_model in ("auto", "actions"):
        return action_means(split, num_actions)
    if header is None:
        raise ConfigError("reward_model: a table without contexts only has `actions`")
    return load_scorer(Path(request.reward_model), header).on(split)


def _estimators(request: Request, records: Records) -> dict[str, Estimator]:
    can_model = records.predicted is not None
    names = request.estimators or [name for name in BUILT_IN if can_model or name not in NEEDS_MODEL]
    for name in names:
        if name in NEEDS_MODEL and not can_model:
            raise ConfigError(f"estimators: {name} needs the policy's probabilities of all actions, not of one column")
    return {name: resolve("estimators", name, BUILT_IN) for name in names}


def _bernstein(request: Request, records: Records) -> tuple[Bernstein | None, list[str]]:
    """The range that the bound needs; what was not given is taken from the log, and said."""
    if request.interval == "bootstrap":
        return None, []
    notes = ["empirical Bernstein holds for independent events; the standard error above is over clients"]
    low, high = request.reward_range or (float(records.rewards.min()), float(records.rewards.max()))
    if not low < high:
        raise ConfigError(f"reward_range: must be low,high with low below high, not {low:g},{high:g}")
    if request.reward_range is None:
        notes.append(f"rewards taken to lie in [{low:g}, {high:g}], as in the log; --reward-range says it for sure")
    elif records.rewards.min() < low or records.rewards.max() > high:
        raise ConfigError(f"reward_range: the log has rewards outside [{low:g}, {high:g}]")
    floor = request.floor or float(records.propensities.min())
    if np.any(records.propensities < floor * (1 - 1e-6)):
        raise ConfigError(f"floor: the log has propensities below {floor:g}")
    if request.floor is None:
        notes.append(f"propensities taken to be at least {floor:g}, as in the log; --floor says it for sure")
    return Bernstein(low, high, floor), notes
