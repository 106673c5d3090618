"""`fedbandit evaluate` as a function: a log, a policy, and what the estimators say.

Knows nothing of the terminal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbandit.core.errors import ConfigError, DataError, needing, refuse
from fedbandit.core.parts import nearest, resolve
from fedbandit.data.dataset import FederatedDataset, Log, Split
from fedbandit.data.importers.columns import Table
from fedbandit.evaluation.logs import (
    LogColumns,
    RowScores,
    action_means,
    estimated_propensities,
    linear_rewards,
    log_of,
    read_log_table,
    records_for,
    records_of,
)
from fedbandit.ope import (
    BUILT_IN,
    Bootstrap,
    Clipped,
    Estimate,
    Estimator,
    Plain,
    Range,
    Records,
    Shrunk,
    Switch,
    Weighting,
    choose_estimator,
    estimate,
)
from fedbandit.policies import Constant, Policy, Uniform, make_policy
from fedbandit.results import Results
from fedbandit.studies.trained_models import Scorer, load_scorer, trained_on

_FEW_REWARDED = 30  # events with a reward; fewer of them decide nothing


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest(LogColumns):
    """A request for an evaluation: the columns of the log, and what to estimate from it.

    The names are those of the command line's options.
    """

    policy: str | Policy | None = None  # uniform, where no target column says what the policy does
    parameters: Mapping[str, Any] = field(default_factory=dict)
    model: Path | None = None  # whose scores the policy looks at
    reward_model: str = "auto"  # linear where there are contexts, actions (each one's mean), a path
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
    split: Literal["train", "test"] | None = None  # of a data set; held out, where there is such

    @property
    def policy_name(self) -> str:
        """The name of the policy in messages."""
        if isinstance(self.policy, str):
            return self.policy
        return type(self.policy).__name__ if self.policy else "uniform"

    @property
    def scored(self) -> bool:
        """Whether the policy looks at a model's scores."""
        if self.policy is None or isinstance(self.policy, str):
            return self.policy_name not in ("uniform", "constant")
        return not isinstance(self.policy, Uniform | Constant)

    def policy_over(self, actions: tuple[str, ...]) -> Policy:
        """The policy to evaluate, over actions of these names (none: over candidates)."""
        if self.policy is not None and not isinstance(self.policy, str):
            return self.policy
        if self.policy_name != "constant":
            return make_policy(self.policy_name, self.parameters)
        named, example = str(self.parameters.get("action")), "".join(actions[:1])
        unknown = "".join([key for key in self.parameters if key != "action"][:1])
        refuse(
            (not actions, "policy.name: constant takes a fixed action; here are candidates"),
            (unknown != "", f"policy.{unknown}: unknown key; constant takes only action"),
            (
                "action" not in self.parameters,
                f"policy.action: missing; for example --set action={example}",
            ),
            (
                named not in actions,
                f"policy.action: no action called {named!r}{nearest(named, actions)}",
            ),
        )
        return Constant(actions.index(named))

    @property
    def weighting(self) -> Weighting:
        """The change made to importance weights: none, clipping, or shrinkage."""
        if self.shrink is not None:
            return Shrunk(self.shrink)
        return Plain() if self.clip is None else Clipped(self.clip)


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Estimates beside the reward that the log itself earned; printed, it is a table.

    `chosen` is the estimator that predicts held-out clients best, of those with an interval.
    """

    estimates: dict[str, Estimate]
    logged_reward: float  # the mean reward of the logging policy, as logged
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()  # to be read before any number
    chosen: str | None = None

    def __getitem__(self, estimator: str) -> Estimate:
        """The estimate of one estimator, by its name: `found["snips"]`."""
        return self.estimates[estimator]

    def __repr__(self) -> str:
        """Cautions first, then what the log is, a line for each estimate, and warnings."""
        first, several = next(iter(self.estimates.values())), len(self.estimates) > 1
        who = f"{first.events} events of {first.clients} clients"
        size, weight = first.effective_sample_size, first.mean_weight
        warnings = [text for found in self.estimates.values() for text in found.warnings]
        lines = [
            *(f"warning: {caution}" for caution in self.cautions),
            f"{who}; the log itself earned {self.logged_reward:.4f}",
            f"effective sample size {size:.1f}, mean weight {weight:.3f}",
            "",
            f"{'':<6} {'estimate':>9} {'std.err.':>9}   "
            f"{100 * first.interval.confidence:g}% interval",
        ]
        for name, found in self.estimates.items():
            mark = "  <- best by cross-validation" if name == self.chosen and several else ""
            figures = f"{found.value:9.4f} {found.standard_error:9.4f}"
            lines.append(f"{name:<6} {figures}   {found.interval}{mark}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *(f"warning: {said}" for said in dict.fromkeys(warnings))])


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
        >>> always_b = {"name": "constant", "action": "b"}
        >>> found = evaluate(log, always_b, client="user", estimators=["snips"])
        >>> found["snips"].value
        1.0
        >>> found
        400 events of 40 clients; the log itself earned 0.5000
        effective sample size 200.0, mean weight 1.000
        <BLANKLINE>
                estimate  std.err.   95% interval
        snips     1.0000    0.0000   0.5979 to 1.0000  (Chernoff bound over clients)
    """
    known = [one.name for one in fields(EvaluationRequest) if one.name != "parameters"]
    for option in options:
        refuse((option not in known, f"{option}: unknown option{nearest(option, known)}"))
    parameters = dict(policy) if isinstance(policy, Mapping) else {}
    if isinstance(policy, Mapping):
        refuse(("name" not in policy, "policy: a policy with parameters needs a name"))
        policy = str(parameters.pop("name"))
    request = EvaluationRequest(
        policy=policy,
        parameters=parameters,
        model=model.folder("model")
        if isinstance(model, Results)
        else Path(model)
        if model
        else None,
        client=client,
        target=target,
        estimators=list(estimators),
        **options,
    )
    if isinstance(logs, str | Path):
        return evaluate_logs(Path(logs), request)
    return evaluate_logs(logs if isinstance(logs, FederatedDataset) else _table_of(logs), request)


def _table_of(frame: Any) -> Table:
    """A table of decisions in memory, read and checked as a file is."""
    try:
        with needing("a table"):
            import pyarrow as pa
        table = Table(pa.table(frame))
    except (TypeError, ValueError) as error:
        raise DataError(f"logs: no table of decisions: {error}") from None
    table.label = "logs"
    return table


def evaluate_logs(logs: Path | Table | FederatedDataset, request: EvaluationRequest) -> Evaluation:
    """Evaluate a policy on logged decisions, and return the estimates with intervals and warnings.

    A folder, or a `FederatedDataset`, is a data set made by `fedbandit data import logged`; a file
    or a `Table` holds decisions without contexts.
    """
    refuse(
        (isinstance(logs, Path) and not logs.exists(), f"{logs}: no such file or folder"),
        error=DataError,
    )
    of_table = isinstance(logs, Table) or (isinstance(logs, Path) and not logs.is_dir())
    _refuse_unused(request, of_table)
    if isinstance(logs, Path):
        logs = Table(logs) if of_table else FederatedDataset.open(logs)
    opened = _of_table(logs, request) if isinstance(logs, Table) else _of_dataset(logs, request)
    split, k = opened.split, len(opened.actions)
    within, notes = _within(request, log_of(split))
    every = [_records(opened, request, within)]
    if request.estimate_propensities:
        guesses = estimated_propensities(split, k)
        every = [replace(every[0], propensities=guess) for guess in guesses]
        notes.append(
            "propensities are estimated: right if the log chose by nothing but what is in it;"
            f" intervals hold under {len(every)} ways to estimate them"
        )
    records, weighting = every[0], request.weighting
    chosen = _estimators(request, records)
    found = [
        estimate(
            one,
            chosen,
            confidence=request.confidence,
            weighting=weighting,
            bootstrap=Bootstrap(request.replicates, request.seed),
            interval=request.interval,
            within=within,
        )
        for one in every
    ]
    estimates = {name: _hull([each[name] for each in found]) for name in chosen}
    bounded = {name: one for name, one in estimates.items() if not one.interval.refusal}
    best = choose_estimator(records, chosen, weighting, bounded)
    earned = float(records.rewards.mean())
    return Evaluation(estimates, earned, tuple(notes), tuple(opened.cautions), best)


def _hull(found: Sequence[Estimate]) -> Estimate:
    """The first estimate, with an interval that holds all the others'."""
    first, intervals = found[0], [one.interval for one in found]
    if refused := [one for one in intervals if one.refusal]:
        return replace(first, interval=refused[0])
    low, high = min(one.low for one in intervals), max(one.high for one in intervals)
    warnings = tuple(dict.fromkeys(text for one in found for text in one.warnings))
    return replace(first, interval=replace(first.interval, low=low, high=high), warnings=warnings)


def _refuse_unused(request: EvaluationRequest, of_table: bool) -> None:
    """Refuse options that do not fit what is evaluated: the answer would be taken for another's."""
    named = [one.name for one in fields(LogColumns) if getattr(request, one.name) != one.default]
    beside = {
        "policy": request.policy is not None,
        "set": bool(request.parameters),
        "model": request.model is not None,
        "reward_model": request.reward_model != "auto",
    }
    refuse(
        (
            of_table and request.split is not None,
            "split: a table is not split; `fedbandit data import logged --test-fraction` splits it",
        ),
        *(
            (not of_table, f"{name}: names a column of a table; a data set folder has its own")
            for name in named
        ),
        *(
            (
                request.target is not None and given,
                f"{name}: the column {request.target} says what the policy does; give one of the"
                " two",
            )
            for name, given in beside.items()
        ),
        (
            request.target is None and request.model is not None and not request.scored,
            f"model: {request.policy_name} looks at no scores; name a policy that does, with"
            " --policy",
        ),
        (
            request.estimate_propensities and request.floor is not None,
            "floor: is of logged propensities; estimated ones have none",
        ),
        (
            request.clip is not None and request.shrink is not None,
            "clip, shrink: give one of them",
        ),
        *(
            (not 0 < value < inf, f"{name}: must be positive and finite, not {value:g}")
            for name in ("clip", "shrink", "switch")
            if (value := getattr(request, name)) is not None
        ),
    )


@dataclass(frozen=True)
class _Opened:
    """A log to evaluate on, and what is to be read before any number."""

    split: Split
    actions: tuple[str, ...]  # their names; none over candidates
    dataset: FederatedDataset | None = None
    target: np.ndarray | None = None  # [n]: the policy's probabilities, where a column has them
    scorer: Scorer | None = None
    cautions: Sequence[str] = ()


def _of_table(source: Table, request: EvaluationRequest) -> _Opened:
    """A log without contexts, with the target column where one was named."""
    columns = replace(request, propensity=None) if request.estimate_propensities else request
    split, actions, target = read_log_table(source, columns)
    return _Opened(split, actions, target=target)


def _of_dataset(dataset: FederatedDataset, request: EvaluationRequest) -> _Opened:
    """A split of a data set, with the model that its policy looks at, and cautions about both."""
    header = dataset.header
    held_out = dataset.test is not None and dataset.test.num_examples > 0
    name = request.split or ("test" if held_out else "train")
    split = dataset.test if name == "test" else dataset.train
    if split is None:
        raise ConfigError(f"split: {header.name} has no test split")
    rewards = np.asarray(log_of(split).rewards)
    refuse((not len(rewards), "split: holds no events"))
    scorer, cautions = None, []
    if request.scored:
        if request.model is None:
            needs = f"{request.policy_name} needs a model's scores"
            raise ConfigError(f"model: {needs}; give --model, a run folder or model file")
        scorer = load_scorer(request.model, header)
        cautions = _flattery(scorer, dataset, name, held_out)
    rewarded = int(np.count_nonzero(rewards))
    if name == "test" and rewarded < _FEW_REWARDED:
        few = f"only {rewarded} of {len(rewards)} held-out events have a reward"
        cautions.append(f"{few}: too few to tell policies apart; hold out more when importing")
    if header.source.get("propensities") == "estimated" and not request.estimate_propensities:
        cautions.append("the propensities of this log were estimated when it was imported")
    return _Opened(split, header.actions, dataset, scorer=scorer, cautions=cautions)


def _flattery(scorer: Scorer, dataset: FederatedDataset, split: str, held_out: bool) -> list[str]:
    """A caution where the model may have seen these events."""
    others = "the clients held out (without --split) are others"
    where = others if held_out else "nothing is held out here"
    if split == "train" and scorer.trained_on == trained_on(dataset):
        return [f"the model was trained on these very events, which flatters it; {where}"]
    if split == "train" and scorer.trained_on is None:
        seen = "these are the events to train on; a model that has seen them is flattered"
        return [f"{seen}; {where}"]
    return []


def _records(opened: _Opened, request: EvaluationRequest, within: Range | None) -> Records:
    """The log for the policy asked about: its probabilities, and what a reward model says."""
    split = opened.split
    if opened.target is not None:
        return records_for(split, opened.target)
    policy = request.policy_over(opened.actions)
    refuse(
        (
            request.scored and opened.scorer is None,
            "policy: a model's policy needs contexts; import the table with `fedbandit data import"
            " logged`, or give --target, a column with the policy's probabilities",
        )
    )
    scores = None if opened.scorer is None else opened.scorer.on(split)
    ends = None if within is None else (within.low, within.high)
    rewards = _reward_model(opened, request.reward_model)
    return records_of(split, policy, len(opened.actions), scores, rewards, within=ends)


def _reward_model(opened: _Opened, name: str) -> RowScores:
    """The reward model by its name: fitted to the log, or read from a path."""
    split, k = opened.split, len(opened.actions)
    if name in ("auto", "linear"):
        fitted = linear_rewards(split, k)
        if fitted is not None:
            return fitted
        refuse(
            (
                name == "linear",
                "reward_model: linear needs contexts; `fedbandit data import logged` reads them",
            )
        )
    if name in ("auto", "actions"):
        return action_means(split, k)
    if opened.dataset is None:
        raise ConfigError("reward_model: a table without contexts only has `actions`")
    return load_scorer(Path(name), opened.dataset.header).rewards_on(split)


def _estimators(request: EvaluationRequest, records: Records) -> dict[str, Estimator]:
    """The estimators asked for, or all that the records have enough for."""
    can_model, known = records.predicted is not None, dict(BUILT_IN)
    if request.switch is not None:
        known["switch"] = Switch(request.switch)
    names = request.estimators or [n for n, e in known.items() if can_model or not e.needs_model]
    found = {name: resolve("estimators", name, known) for name in names}
    for name, estimator in found.items():
        if estimator.needs_model and not can_model:
            needs = f"{name} needs the policy's probabilities of all actions, not of one column"
            raise ConfigError(f"estimators: {needs}")
    return found


def _within(request: EvaluationRequest, log: Log) -> tuple[Range | None, list[str]]:
    """The range of rewards and propensities; what was not given is taken from the log, and said."""
    notes: list[str] = []
    lowest, highest = float(np.min(log.rewards)), float(np.max(log.rewards))
    if request.reward_range is not None:
        within = Range(*request.reward_range, request.floor)
        if lowest < within.low or highest > within.high:
            ends = f"[{within.low:g}, {within.high:g}]"
            raise ConfigError(f"reward_range: the log has rewards outside {ends}")
    elif request.floor is None and request.interval == "bootstrap":
        return None, notes
    elif lowest < highest:
        within, ends = Range(lowest, highest, request.floor), f"[{lowest:g}, {highest:g}]"
        said = "as in the log; --reward-range says it for sure"
        notes.append(f"rewards taken to lie in {ends}, {said}")
    else:
        raise ConfigError(
            "reward_range: all rewards of the log are the same; say how they may differ"
        )
    if request.floor is None and request.interval == "bernstein":
        heaviest = "weights taken to be at most the log's largest"
        notes.append(f"{heaviest}; --floor says how small a propensity may be")
    return within, notes
