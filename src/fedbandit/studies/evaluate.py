"""`fedbandit evaluate` as a function: a log, a policy, and what the estimators say. Knows nothing of the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.parts import nearest, resolve
from fedbandit.data.dataset import FederatedDataset, Header, Log, Split
from fedbandit.evaluation.ope.estimate import Constant, looks_at_scores, target_policy
from fedbandit.evaluation.ope.estimators import BUILT_IN, NEEDS_MODEL, Estimator
from fedbandit.evaluation.ope.logs import LogColumns, RowScores, log_of, read_log_table, records_for, records_of
from fedbandit.evaluation.ope.reward_models import action_means, linear_rewards
from fedbandit.ope import (
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
from fedbandit.policies import Policy, Uniform
from fedbandit.results import Results
from fedbandit.results.reading import needed
from fedbandit.studies.scoring import load_scorer


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What to evaluate and how; the names are those of the command line's options."""

    policy: str | Policy | None = None  # uniform, where no target column says what the policy does
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
    split: Literal["train", "test"] | None = None  # of a data set; train
    columns: LogColumns = field(default_factory=LogColumns)

    @property
    def policy_name(self) -> str:
        """What the policy is called in messages."""
        return self.policy if isinstance(self.policy, str) else type(self.policy).__name__ if self.policy else "uniform"

    @property
    def scored(self) -> bool:
        """Whether the policy looks at a model's scores."""
        if self.policy is None or isinstance(self.policy, str):
            return looks_at_scores(self.policy_name)
        return not isinstance(self.policy, Uniform | Constant)

    def target(self, actions: tuple[str, ...]) -> Policy:
        """The policy to evaluate, over actions of these names."""
        if self.policy is None or isinstance(self.policy, str):
            return target_policy(self.policy_name, self.parameters, actions)
        return self.policy

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


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What the estimators say, beside what the log itself earned; printed, it is a table."""

    estimates: dict[str, Estimate]
    logged_reward: float  # the mean reward of the logging policy, as logged
    notes: tuple[str, ...] = ()

    def __getitem__(self, estimator: str) -> Estimate:
        return self.estimates[estimator]

    def __repr__(self) -> str:
        first = next(iter(self.estimates.values()))
        lines = [
            f"{first.events} events of {first.clients} clients; the log itself earned {self.logged_reward:.4f}",
            f"effective sample size {first.effective_sample_size:.1f}, mean weight {first.mean_weight:.3f}",
            "",
            f"{'':<6} {'estimate':>9} {'std.err.':>9}   {100 * first.interval.confidence:g}% interval",
        ]
        for name, found in self.estimates.items():
            where = f"{found.interval.low:.4f} to {found.interval.high:.4f}"
            lines.append(
                f"{name:<6} {found.value:9.4f} {found.standard_error:9.4f}   {where}  ({found.interval.method})"
            )
        warnings = dict.fromkeys(text for found in self.estimates.values() for text in found.warnings)
        return "\n".join(
            [*lines, *(f"note: {note}" for note in self.notes), *(f"warning: {said}" for said in warnings)]
        )


def evaluate(
    logs: Any,
    policy: Policy | Mapping[str, Any] | str | None = None,
    *,
    model: Path | str | Results | None = None,
    client: str | None = None,
    target: str | None = None,
    estimators: Sequence[str] = (),
    **options: Any,
) -> Evaluation:
    """What a policy would have earned, from the log of another one: estimates with intervals and warnings.

    `logs` is a table of decisions with the columns `action`, `reward` and `propensity`: a data frame, an Arrow table,
    a dictionary of columns, or the path of a .csv, .tsv or .parquet file. Or it is a data set of logged feedback, or
    the folder of one (`fedbandit data import logged`). `client` names the column with the client's id; without it
    every row counts as a client of its own.

    `policy` is a policy, a name (`"uniform"`), or a name with parameters (`{"name": "constant", "action": "c"}`). One
    that explores by scores needs a `model`: a run folder, a model file, or the `Results` of a run in a folder. Models
    need contexts, which only data sets have. In place of a policy, `target` names a column of the table with the
    policy's probability of the action taken.

    Further options are those of `fedbandit evaluate`: the columns `action`, `reward`, `propensity` and `available`;
    `split`, `reward_model`, `clip`, `shrink`, `confidence`, `interval`, `reward_range`, `floor`, `replicates`, `seed`.

    Examples:
        >>> log = {
        ...     "user": [f"u{i % 40}" for i in range(400)],
        ...     "action": ["ab"[i % 2] for i in range(400)],
        ...     "reward": [i % 2 for i in range(400)],  # b always pays, a never
        ...     "propensity": [0.5] * 400,
        ... }
        >>> found = evaluate(log, {"name": "constant", "action": "b"}, client="user", estimators=["snips"])
        >>> found["snips"].value
        1.0
        >>> found
        400 events of 40 clients; the log itself earned 0.5000
        effective sample size 200.0, mean weight 1.000
        <BLANKLINE>
                estimate  std.err.   95% interval
        snips     1.0000    0.0000   1.0000 to 1.0000  (bootstrap over clients)
    """
    own = {"policy", "parameters", "model", "estimators", "columns"}
    known = {one.name for one in fields(EvaluationRequest)} - own
    named = {one.name for one in fields(LogColumns)}
    for option in options:
        if option not in known | named:
            raise ConfigError(f"{option}: unknown option{nearest(option, known | named)}")
    parameters: dict[str, Any] = {}
    if isinstance(policy, Mapping):
        if "name" not in policy:
            raise ConfigError("policy: a policy with parameters needs a name")
        parameters = {key: value for key, value in policy.items() if key != "name"}
        policy = str(policy["name"])
    columns = {"client": client, "target": target, **{k: v for k, v in options.items() if k in named}}
    request = EvaluationRequest(
        policy=policy,
        parameters=parameters,
        model=_model_path(model),
        estimators=list(estimators),
        columns=LogColumns(**columns),
        **{key: value for key, value in options.items() if key in known},
    )
    if isinstance(logs, str | Path | FederatedDataset):
        return evaluate_logs(Path(logs) if isinstance(logs, str) else logs, request)
    return _evaluate_table(logs, request)


def _evaluate_table(table: Any, request: EvaluationRequest) -> Evaluation:
    """Through a file, so that a table in memory is read and checked as any other."""
    pa, parquet = needed("pyarrow"), needed("pyarrow.parquet")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "logs.parquet"
        try:
            parquet.write_table(pa.table(table), path)
        except (TypeError, ValueError) as error:
            raise DataError(f"logs: no table of decisions: {error}") from None
        try:
            return evaluate_logs(path, request)
        except DataError as error:
            raise DataError(str(error).replace(str(path), "logs")) from None


def _model_path(model: Path | str | Results | None) -> Path | None:
    if not isinstance(model, Results):
        return None if model is None else Path(model)
    folders = [run.folder for run in model.runs]
    if len(folders) != 1 or folders[0] is None:
        raise ConfigError("model: take the results of one run that lies in a folder, as `run` makes it")
    return folders[0]


def evaluate_logs(logs: Path | FederatedDataset, request: EvaluationRequest) -> Evaluation:
    """Evaluate a policy on a table of decisions, or on a data set made by `fedbandit data import logged`."""
    if isinstance(logs, Path) and not logs.exists():
        raise DataError(f"{logs}: no such file or folder")
    of_table = isinstance(logs, Path) and not logs.is_dir()
    _refuse_what_would_not_be_used(request, of_table)
    if isinstance(logs, Path) and of_table:
        records, bernstein, notes = _table_records(logs, request)
    else:
        dataset = FederatedDataset.open(logs) if isinstance(logs, Path) else logs
        records, bernstein, notes = _dataset_records(dataset, request)
    chosen = _estimators(request, records)
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


def _refuse_what_would_not_be_used(request: EvaluationRequest, of_table: bool) -> None:
    """An option that does not fit what is evaluated is a mistake, and its answer would be taken for another's."""
    columns = request.columns
    if of_table and request.split is not None:
        raise ConfigError("split: a table is not split; `fedbandit data import logged --test-fraction` splits it")
    if not of_table:
        named = [one.name for one in fields(columns) if getattr(columns, one.name) != one.default]
        if named:
            raise ConfigError(f"{named[0]}: names a column of a table; a data set folder has its columns already")
    if columns.target is not None:
        beside = {
            "policy": request.policy is not None,
            "set": bool(request.parameters),
            "model": request.model is not None,
            "reward_model": request.reward_model != "auto",
        }
        for name, given in beside.items():
            if given:
                raise ConfigError(f"{name}: the column {columns.target} says what the policy does; give one of the two")
    elif request.model is not None and not request.scored:
        raise ConfigError(f"model: {request.policy_name} looks at no scores; name a policy that does, with --policy")
    if request.interval != "bernstein":
        for name in ("floor", "reward_range"):
            if getattr(request, name) is not None:
                raise ConfigError(f"{name}: only the Bernstein bound needs it; give --interval bernstein")


_Ready = tuple[Records, Bernstein | None, list[str]]


def _table_records(path: Path, request: EvaluationRequest) -> _Ready:
    table = read_log_table(path, request.columns)
    bernstein, notes = _bernstein(request, log_of(table.split))
    if table.target is not None:
        return records_for(table.split, table.target), bernstein, notes
    policy = request.target(table.actions)
    if request.scored:
        raise ConfigError(
            "policy: a model's policy needs contexts; import the table with `fedbandit data import logged`,"
            " or give --target, a column with the policy's probabilities"
        )
    k, rewards = len(table.actions), _rewards(table.split, None, len(table.actions), request)
    return records_of(table.split, policy, k, rewards=rewards, within=_range(bernstein)), bernstein, notes


def _dataset_records(dataset: FederatedDataset, request: EvaluationRequest) -> _Ready:
    split, header = dataset.test if request.split == "test" else dataset.train, dataset.header
    if split is None:
        raise ConfigError(f"split: {header.name} has no test split")
    log, k = log_of(split), header.num_actions
    if not len(log.rewards):
        raise ConfigError("split: holds no events")
    bernstein, notes = _bernstein(request, log)
    policy = request.target(header.actions)
    scores = None
    if request.scored:
        if request.model is None:
            raise ConfigError(
                f"model: {request.policy_name} needs a model's scores; give --model, a run folder or model file"
            )
        scores = load_scorer(request.model, header).on(split)
    rewards = _rewards(split, header, k, request)
    return records_of(split, policy, k, scores, rewards, within=_range(bernstein)), bernstein, notes


def _range(bernstein: Bernstein | None) -> tuple[float, float] | None:
    return None if bernstein is None else (bernstein.low, bernstein.high)


def _rewards(split: Split, header: Header | None, num_actions: int, request: EvaluationRequest) -> RowScores:
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
    return load_scorer(Path(request.reward_model), header).rewards_on(split)


def _estimators(request: EvaluationRequest, records: Records) -> dict[str, Estimator]:
    can_model = records.predicted is not None
    names = request.estimators or [name for name in BUILT_IN if can_model or name not in NEEDS_MODEL]
    for name in names:
        if name in NEEDS_MODEL and not can_model:
            raise ConfigError(f"estimators: {name} needs the policy's probabilities of all actions, not of one column")
    return {name: resolve("estimators", name, BUILT_IN) for name in names}


def _bernstein(request: EvaluationRequest, log: Log) -> tuple[Bernstein | None, list[str]]:
    """The range that the bound needs; what was not given is taken from the log, and said."""
    if request.interval == "bootstrap":
        return None, []
    notes = ["empirical Bernstein holds for independent events; the standard error above is over clients"]
    lowest, highest = float(np.min(log.rewards)), float(np.max(log.rewards))
    low, high = request.reward_range or (lowest, highest)
    if not (low < high and isfinite(low) and isfinite(high)):
        raise ConfigError(f"reward_range: must be low,high with low below high, not {low:g},{high:g}")
    if request.reward_range is None:
        notes.append(f"rewards taken to lie in [{low:g}, {high:g}], as in the log; --reward-range says it for sure")
    elif lowest < low or highest > high:
        raise ConfigError(f"reward_range: the log has rewards outside [{low:g}, {high:g}]")
    smallest = float(np.min(log.propensities))
    floor = smallest if request.floor is None else request.floor
    if not 0 < floor <= 1:
        raise ConfigError(f"floor: a propensity is above 0 and at most 1, not {floor:g}")
    if smallest < floor * (1 - 1e-6):
        raise ConfigError(f"floor: the log has propensities below {floor:g}")
    if request.floor is None:
        notes.append(f"propensities taken to be at least {floor:g}, as in the log; --floor says it for sure")
    return Bernstein(low, high, floor), notes
