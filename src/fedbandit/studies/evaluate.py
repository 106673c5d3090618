"""`fedbandit evaluate` as a function: a log, a policy, and what the estimators say. Knows nothing
of the terminal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.parts import nearest, resolve
from fedbandit.data.dataset import FederatedDataset, Header, Log, Split
from fedbandit.data.formats.columns import Table
from fedbandit.evaluation.ope.estimate import Constant, looks_at_scores, target_policy
from fedbandit.evaluation.ope.estimators import BUILT_IN, NEEDS_MODEL, Estimator
from fedbandit.evaluation.ope.logs import (
    LogColumns,
    RowScores,
    log_of,
    read_log_table,
    records_for,
    records_of,
)
from fedbandit.evaluation.ope.propensities import estimated_propensities
from fedbandit.evaluation.ope.reward_models import action_means, linear_rewards
from fedbandit.ope import (
    Bootstrap,
    Clipped,
    Estimate,
    Plain,
    Range,
    Records,
    Shrunk,
    Switch,
    Weighting,
    choose_estimator,
    estimate,
)
from fedbandit.policies import Policy, Uniform
from fedbandit.results import Results
from fedbandit.results.reading import needed
from fedbandit.studies.scoring import Scorer, load_scorer, trained_on


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """A request for an evaluation; the names are those of the command line's options."""

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
    switch: float | None = None  # the largest weight that SWITCH uses
    estimate_propensities: bool = False  # from the log itself, where it recorded none or wrong ones
    replicates: int = 1000
    seed: int = 0
    split: Literal["train", "test"] | None = (
        None  # of a data set; the held-out one, where there is one
    )
    columns: LogColumns = field(default_factory=LogColumns)

    @property
    def policy_name(self) -> str:
        """The name of the policy in messages."""
        return (
            self.policy
            if isinstance(self.policy, str)
            else type(self.policy).__name__
            if self.policy
            else "uniform"
        )

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
    """Estimates beside the reward that the log itself earned; printed, it is a table."""

    estimates: dict[str, Estimate]
    logged_reward: float  # the mean reward of the logging policy, as logged
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()  # to be read before any number
    chosen: str | None = (
        None  # of the estimators with an interval, the one that predicts held-out clients best
    )

    def __getitem__(self, estimator: str) -> Estimate:
        return self.estimates[estimator]

    def __repr__(self) -> str:
        first = next(iter(self.estimates.values()))
        lines = [
            *(f"warning: {caution}" for caution in self.cautions),
            f"{first.events} events of {first.clients} clients; the log itself earned {self.logged_reward:.4f}",
            f"effective sample size {first.effective_sample_size:.1f}, mean weight {first.mean_weight:.3f}",
            "",
            f"{'':<6} {'estimate':>9} {'std.err.':>9}   {100 * first.interval.confidence:g}% interval",
        ]
        for name, found in self.estimates.items():
            mark = (
                "  <- best by cross-validation"
                if name == self.chosen and len(self.estimates) > 1
                else ""
            )
            lines.append(
                f"{name:<6} {found.value:9.4f} {found.standard_error:9.4f}   {found.interval}{mark}"
            )
        warnings = dict.fromkeys(
            text for found in self.estimates.values() for text in found.warnings
        )
        return "\n".join(
            [
                *lines,
                *(f"note: {note}" for note in self.notes),
                *(f"warning: {said}" for said in warnings),
            ]
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
    """The reward that a policy would have earned, from the log of another one: estimates with
    intervals and warnings.

    `logs` is a table of decisions with the columns `action`, `reward` and `propensity`: a data
    frame, an Arrow table, a dictionary of columns, or the path of a .csv, .tsv or .parquet file. Or
    it is a data set of logged feedback, or the folder of one (`fedbandit data import logged`).
    `client` names the column with the client's id; without it every row counts as a client of its
    own.

    `policy` is a policy, a name (`"uniform"`), or a name with parameters (`{"name": "constant",
    "action": "c"}`). One that explores by scores needs a `model`: a run folder, a model file, or
    the `Results` of a run in a folder. Models need contexts, which only data sets have. In place of
    a policy, `target` names a column of the table with the policy's probability of the action
    taken.

    A data set is evaluated on its held-out clients; `split="train"` asks for the others.

    Further options are those of `fedbandit evaluate`: the columns `action`, `reward`, `propensity`
    and `available`; `split`, `reward_model`, `clip`, `shrink`, `switch`, `confidence`, `interval`,
    `reward_range`, `floor`, `estimate_propensities`, `replicates`, `seed`.

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
        snips     1.0000    0.0000   0.5979 to 1.0000  (Chernoff bound over clients)
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
    columns = {
        "client": client,
        "target": target,
        **{k: v for k, v in options.items() if k in named},
    }
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
    return evaluate_logs(_table_of(logs), request)


def _table_of(frame: Any) -> Table:
    """A table of decisions in memory, read and checked as a file is."""
    try:
        table = Table(needed("pyarrow").table(frame))
    except (TypeError, ValueError) as error:
        raise DataError(f"logs: no table of decisions: {error}") from None
    table.label = "logs"
    return table


def _model_path(model: Path | str | Results | None) -> Path | None:
    if not isinstance(model, Results):
        return None if model is None else Path(model)
    folders = [run.folder for run in model.runs]
    if len(folders) != 1 or folders[0] is None:
        raise ConfigError(
            "model: take the results of one run that lies in a folder, as `run` makes it"
        )
    return folders[0]


def evaluate_logs(logs: Path | Table | FederatedDataset, request: EvaluationRequest) -> Evaluation:
    """Evaluate a policy on logged decisions, and return the estimates with intervals and warnings.

    A folder, or a `FederatedDataset`, is a data set made by `fedbandit data import logged`; a file
    or a `Table` holds decisions without contexts.
    """
    if isinstance(logs, Path) and not logs.exists():
        raise DataError(f"{logs}: no such file or folder")
    if isinstance(logs, Path):
        of_table = not logs.is_dir()
        _refuse_what_would_not_be_used(request, of_table)
        logs = Table(logs) if of_table else FederatedDataset.open(logs)
    else:
        _refuse_what_would_not_be_used(request, isinstance(logs, Table))
    ready = (
        _table_records(logs, request)
        if isinstance(logs, Table)
        else _dataset_records(logs, request)
    )
    records, notes = ready.records, list(ready.notes)
    chosen = _estimators(request, records)
    found = [
        estimate(
            one,
            chosen,
            confidence=request.confidence,
            weighting=request.weighting,
            bootstrap=Bootstrap(request.replicates, request.seed),
            interval=request.interval,
            within=ready.within,
        )
        for one in [records, *ready.otherwise]
    ]
    estimates = {name: _hull([each[name] for each in found]) for name in chosen}
    if ready.otherwise:
        notes.append(
            "propensities are estimated: right if the log chose by nothing but what is in it; intervals hold under"
            f" {len(found)} ways to estimate them"
        )
    bounded = [name for name, one in estimates.items() if not one.interval.refusal]
    best = choose_estimator(records, chosen, request.weighting, bounded)
    return Evaluation(
        estimates, float(records.rewards.mean()), tuple(notes), tuple(ready.cautions), best
    )


def _hull(found: Sequence[Estimate]) -> Estimate:
    """The first estimate, with an interval that holds all the others'."""
    first, refusals = found[0], [one.interval for one in found if one.interval.refusal]
    if refusals:
        return replace(first, interval=refusals[0])
    low, high = (
        pick(getattr(one.interval, end) for one in found)
        for pick, end in ((min, "low"), (max, "high"))
    )
    warnings = tuple(dict.fromkeys(text for one in found for text in one.warnings))
    return replace(first, interval=replace(first.interval, low=low, high=high), warnings=warnings)


def _refuse_what_would_not_be_used(request: EvaluationRequest, of_table: bool) -> None:
    """An option that does not fit what is evaluated is a mistake, and its answer would be taken for
    another's.
    """
    columns = request.columns
    if of_table and request.split is not None:
        raise ConfigError(
            "split: a table is not split; `fedbandit data import logged --test-fraction` splits it"
        )
    if not of_table:
        named = [one.name for one in fields(columns) if getattr(columns, one.name) != one.default]
        if named:
            raise ConfigError(
                f"{named[0]}: names a column of a table; a data set folder has its columns already"
            )
    if columns.target is not None:
        beside = {
            "policy": request.policy is not None,
            "set": bool(request.parameters),
            "model": request.model is not None,
            "reward_model": request.reward_model != "auto",
        }
        for name, given in beside.items():
            if given:
                raise ConfigError(
                    f"{name}: the column {columns.target} says what the policy does; give one of the two"
                )
    elif request.model is not None and not request.scored:
        raise ConfigError(
            f"model: {request.policy_name} looks at no scores; name a policy that does, with --policy"
        )
    if request.estimate_propensities and request.floor is not None:
        raise ConfigError("floor: is of logged propensities; estimated ones have none")


@dataclass(frozen=True)
class _Ready:
    """A log that can be evaluated, and what is to be said of it."""

    records: Records
    within: Range | None
    notes: Sequence[str]
    cautions: Sequence[str] = ()
    otherwise: Sequence[Records] = ()  # with other propensities that are as likely


def _table_records(source: Table, request: EvaluationRequest) -> _Ready:
    columns = (
        replace(request.columns, propensity=None)
        if request.estimate_propensities
        else request.columns
    )
    table = read_log_table(source, columns)
    within, notes = _within(request, log_of(table.split))
    if table.target is not None:
        records = records_for(table.split, table.target)
    else:
        policy = request.target(table.actions)
        if request.scored:
            raise ConfigError(
                "policy: a model's policy needs contexts; import the table with `fedbandit data import logged`,"
                " or give --target, a column with the policy's probabilities"
            )
        k, rewards = len(table.actions), _rewards(table.split, None, len(table.actions), request)
        records = records_of(table.split, policy, k, rewards=rewards, within=_ends(within))
    return _estimating(_Ready(records, within, notes), table.split, len(table.actions), request)


def _dataset_records(dataset: FederatedDataset, request: EvaluationRequest) -> _Ready:
    header = dataset.header
    held_out = dataset.test is not None and dataset.test.num_examples > 0
    name = request.split or ("test" if held_out else "train")
    split = dataset.test if name == "test" else dataset.train
    if split is None:
        raise ConfigError(f"split: {header.name} has no test split")
    log, k = log_of(split), header.num_actions
    if not len(log.rewards):
        raise ConfigError("split: holds no events")
    within, notes = _within(request, log)
    policy = request.target(header.actions)
    scorer = None
    if request.scored:
        if request.model is None:
            raise ConfigError(
                f"model: {request.policy_name} needs a model's scores; give --model, a run folder or model file"
            )
        scorer = load_scorer(request.model, header)
    cautions = [] if scorer is None else _cautions(scorer, dataset, name, held_out)
    rewards = _rewards(split, header, k, request)
    scores = None if scorer is None else scorer.on(split)
    records = records_of(split, policy, k, scores, rewards, within=_ends(within))
    return _estimating(_Ready(records, within, notes, cautions), split, k, request)


def _cautions(scorer: Scorer, dataset: FederatedDataset, split: str, held_out: bool) -> list[str]:
    """Cautions to read before a model's estimate is read: whether it has seen these events."""
    where = (
        "the clients held out (without --split) are others"
        if held_out
        else "nothing is held out here"
    )
    if split == "train" and scorer.trained_on == trained_on(dataset):
        return [f"the model was trained on these very events, which flatters it; {where}"]
    if split == "train" and scorer.trained_on is None:
        return [
            f"these are the events to train on; a model that has seen them is flattered; {where}"
        ]
    return []


def _estimating(
    ready: _Ready, split: Split, num_actions: int, request: EvaluationRequest
) -> _Ready:
    if not request.estimate_propensities:
        return ready
    first, *others = (
        replace(ready.records, propensities=p) for p in estimated_propensities(split, num_actions)
    )
    return replace(ready, records=first, otherwise=others)


def _ends(within: Range | None) -> tuple[float, float] | None:
    return None if within is None else (within.low, within.high)


def _rewards(
    split: Split, header: Header | None, num_actions: int, request: EvaluationRequest
) -> RowScores:
    if request.reward_model in ("auto", "linear"):
        fitted = linear_rewards(split, num_actions)
        if fitted is not None:
            return fitted
        if request.reward_model == "linear":
            raise ConfigError(
                "reward_model: linear needs contexts; `fedbandit data import logged` reads them"
            )
    if request.reward_model in ("auto", "actions"):
        return action_means(split, num_actions)
    if header is None:
        raise ConfigError("reward_model: a table without contexts only has `actions`")
    return load_scorer(Path(request.reward_model), header).rewards_on(split)


def _estimators(request: EvaluationRequest, records: Records) -> dict[str, Estimator]:
    can_model = records.predicted is not None
    names = request.estimators or [
        name for name in BUILT_IN if can_model or name not in NEEDS_MODEL
    ]
    for name in names:
        if name in NEEDS_MODEL and not can_model:
            raise ConfigError(
                f"estimators: {name} needs the policy's probabilities of all actions, not of one column"
            )
    known = BUILT_IN if request.switch is None else {**BUILT_IN, "switch": _switch(request.switch)}
    return {name: resolve("estimators", name, known) for name in names}


def _switch(limit: float) -> Switch:
    try:
        return Switch(limit)
    except ValueError as error:
        raise ConfigError(f"switch: {error}") from None


def _within(request: EvaluationRequest, log: Log) -> tuple[Range | None, list[str]]:
    """The range of rewards and propensities; what was not given is taken from the log, and
    said.
    """
    notes = []
    lowest, highest = float(np.min(log.rewards)), float(np.max(log.rewards))
    if request.reward_range is not None:
        low, high = request.reward_range
        within = Range(low, high, request.floor)
        if lowest < low or highest > high:
            raise ConfigError(f"reward_range: the log has rewards outside [{low:g}, {high:g}]")
    elif request.floor is None and request.interval == "bootstrap":
        return None, []
    elif lowest < highest:
        within = Range(lowest, highest, request.floor)
        notes.append(
            f"rewards taken to lie in [{lowest:g}, {highest:g}], as in the log; --reward-range says it for sure"
        )
    else:
        raise ConfigError(
            "reward_range: all rewards of the log are the same; say how they may differ"
        )
    smallest = float(np.min(log.propensities))
    if request.floor is not None and smallest < request.floor * (1 - 1e-6):
        raise ConfigError(f"floor: the log has propensities below {request.floor:g}")
    if request.floor is None and request.interval == "bernstein":
        notes.append(
            "weights taken to be at most the log's largest; --floor says how small a propensity may be"
        )
    return within, notes
