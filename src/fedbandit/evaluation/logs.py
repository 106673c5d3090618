"""Logged feedback as records of off-policy evaluation, with reward models and propensities from it.

Logs come from a data set, with contexts and perhaps candidates, or from a table of decisions.
Models are fitted from sums that add up over clients, each half of the clients from the other half.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from fedbandit.acting import explore
from fedbandit.core.contexts import Contexts, Features
from fedbandit.core.errors import DataError
from fedbandit.core.prediction import Prediction, at_actions, over_actions
from fedbandit.core.progress import SILENT
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Log, Split
from fedbandit.data.importers.columns import Table
from fedbandit.data.text import in_natural_order, split_labels
from fedbandit.evaluation.estimators import Records
from fedbandit.models.candidates import PARTS, candidate_rows
from fedbandit.policies import Policy

RowScores = Callable[[np.ndarray], np.ndarray]
"""Rows of a split -> a number for every action, [n, K], over candidates [m]: predicted rewards."""
RowPredictions = Callable[[np.ndarray], Prediction]
"""Rows of a split -> what a model says about them: what a policy decides by."""
PRIOR_EVENTS = 10.0  # an action is held to be average until it has been seen about this often
_ROWS = 4096  # looked at at a time
_MOST_NUMBERS = 2**21  # in the sums that a client returns; wide contexts are cut to what tells most
_MOST_COLUMNS = 256
_CROSSES = 2**18  # weights of hashed crosses of candidates and contexts
_LEAST = 0.1  # of an action's share: no context makes an action rarer than this


def log_of(split: Split) -> Log:
    """The split's log; `DataError` for a split of labels."""
    if split.log is None:
        raise DataError(
            "the data set holds labels, not logged feedback; `fedbandit data import logged` makes one"
        )
    return split.log


def records_of(
    split: Split,
    policy: Policy,
    num_actions: int,
    predictions: RowPredictions | None = None,
    rewards: RowScores | None = None,
    within: tuple[float, float] | None = None,
) -> Records:
    """The records of a logged split for a policy, over fixed actions or candidates.

    `predictions` are for a policy that goes by scores, `rewards` is a reward model. What that says
    is cut to the range `within`, for bounds that need one.
    """
    log, n = log_of(split), split.num_examples
    target, predicted, expected = np.zeros(n), np.zeros(n), np.zeros(n)
    for rows in _blocks(np.arange(n)):
        contexts, actions = split.contexts(rows), np.asarray(log.actions[rows])
        shown = contexts.candidates
        given = _blank(contexts, num_actions) if predictions is None else predictions(rows)
        mask = available_at(split, rows, num_actions)
        p = explore(policy, given.astype(np.float64), mask, contexts)
        bounds = None if shown is None else shown.bounds
        target[rows] = at_actions(p, actions, bounds)
        if rewards is not None:
            # Cut action by action, before any average: only so is the weighted prediction, on
            # average, the expected one.
            modelled = rewards(rows) if within is None else np.clip(rewards(rows), *within)
            predicted[rows] = at_actions(modelled, actions, bounds)
            expected[rows] = over_actions(p * modelled, bounds)
    return records_for(split, target, *(() if rewards is None else (predicted, expected)))


def _blank(contexts: Contexts, num_actions: int) -> Prediction:
    """Equal scores, for policies that look at none."""
    shown = contexts.candidates
    if shown is None:
        return Prediction(np.zeros((len(contexts), num_actions)))
    return Prediction(np.zeros(len(shown.items)), bounds=shown.bounds)


def records_for(
    split: Split,
    target: np.ndarray,
    predicted: np.ndarray | None = None,
    expected: np.ndarray | None = None,
) -> Records:
    """The records of a logged split whose probabilities [n] of the logged actions are known."""
    log = log_of(split)
    return Records(
        clients=np.arange(split.num_clients),
        bounds=np.asarray(split.offsets, np.int64),
        rewards=np.asarray(log.rewards, np.float64),
        propensities=np.asarray(log.propensities, np.float64),
        target=np.asarray(target, np.float64),
        predicted=predicted,
        expected=expected,
    )


def available_at(split: Split, rows: np.ndarray, num_actions: int) -> np.ndarray | None:
    """Which actions could be taken, bool [n, K], over candidates [m]; None: always all of them."""
    log = log_of(split)
    if log.available is None:
        return None
    sets, shape = log.available.take(rows), (len(rows), num_actions)
    if split.candidates is None:
        bounds = np.arange(len(rows)) * num_actions
    else:
        bounds = split.candidates.take(rows).offsets
        shape = (int(bounds[-1]),)  # type: ignore[assignment]
    mask = np.zeros(shape, bool)
    mask.reshape(-1)[bounds[sets.row_of_entry()] + sets.ids] = True
    return mask


def _halves(split: Split) -> np.ndarray:
    """Which half of the clients each row belongs to, 0 or 1: int64 [n]."""
    return np.repeat(np.arange(split.num_clients) % 2, split.sizes())


def _blocks(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]


def _items(split: Split, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Over candidates, the items shown in these rows, int64 [m], and their bounds [n + 1]."""
    assert split.candidates is not None
    listed = split.candidates.take(rows)
    return listed.ids.astype(np.int64), listed.offsets


def action_means(split: Split, num_actions: int) -> RowScores:
    """Predicted rewards by action alone, over candidates by item, from the other half of the
    clients.
    """
    log, half = log_of(split), _halves(split)
    rewards, kinds = np.asarray(log.rewards, np.float64), num_actions
    chosen = np.asarray(log.actions, np.int64)
    if split.candidates is not None:
        assert split.catalogue is not None
        items, bounds = _items(split, np.arange(split.num_examples))
        chosen, kinds = items[bounds[:-1] + chosen], len(split.catalogue)
    means = np.stack([_means(chosen[half != h], rewards[half != h], kinds) for h in (0, 1)])

    def predict(rows: np.ndarray) -> np.ndarray:
        if split.candidates is None:
            return np.asarray(means[half[rows]])
        shown, bounds = _items(split, rows)
        return np.asarray(means[np.repeat(half[rows], np.diff(bounds)), shown])

    return predict


def _means(actions: np.ndarray, rewards: np.ndarray, kinds: int) -> np.ndarray:
    """The mean reward of each action, shrunk towards that of all: [kinds]."""
    if not len(rewards):
        return np.zeros(kinds)
    totals = np.bincount(actions, rewards, minlength=kinds) + PRIOR_EVENTS * rewards.mean()
    return np.asarray(totals / (np.bincount(actions, minlength=kinds) + PRIOR_EVENTS))


@dataclass(frozen=True)
class Columns:
    """The columns of a context that a linear model looks at, and how they are standardised."""

    chosen: np.ndarray  # int64 [m]
    mean: np.ndarray  # [m]
    deviation: np.ndarray  # [m]

    def features(self, contexts: Features) -> np.ndarray:
        """[n, 1 + m]: a one, and the standardised columns."""
        x = np.zeros((len(contexts), len(self.chosen)))
        if isinstance(contexts, Ragged):
            highest = max(contexts.ids.max(initial=-1), self.chosen.max(initial=-1))
            place = np.full(int(highest) + 1, -1)
            place[self.chosen] = np.arange(len(self.chosen))
            columns, rows = place[contexts.ids], contexts.row_of_entry()
            kept = columns >= 0
            np.add.at(x, (rows[kept], columns[kept]), np.asarray(contexts.values)[kept])
        else:
            x[:] = contexts.reshape(len(contexts), -1)[:, self.chosen]
        return np.concatenate([np.ones((len(x), 1)), (x - self.mean) / self.deviation], axis=1)


@dataclass(frozen=True)
class LinearSums:
    """Sums over logs, which clients return and a server adds up, to fit rewards linear in contexts.

    Examples:
        >>> x, ones = np.ones((3, 1)), np.ones(3)
        >>> sums = linear_sums(x, np.array([0, 1, 1]), ones, num_actions=2)
        >>> (sums + sums).moments
        array([[2.],
               [4.]])
    """

    gram: np.ndarray  # [actions, 1 + m, 1 + m]: X'X over the events of each action
    moments: np.ndarray  # [actions, 1 + m]: X'r

    @classmethod
    def empty(cls, num_actions: int, width: int) -> "LinearSums":
        """The sums of a log without events."""
        return cls(np.zeros((num_actions, width, width)), np.zeros((num_actions, width)))

    def __add__(self, other: "LinearSums") -> "LinearSums":
        return LinearSums(self.gram + other.gram, self.moments + other.moments)

    def fitted(self) -> np.ndarray:
        """[actions, 1 + m]: coefficients; an effect is nil until about `PRIOR_EVENTS` events show
        it.
        """
        events = self.gram[:, 0, 0].sum()
        average = self.moments[:, 0].sum() / events if events else 0.0
        ridge = PRIOR_EVENTS * np.eye(self.gram.shape[1])
        moments = self.moments - average * self.gram[:, 0]
        found = np.linalg.solve(self.gram + ridge, moments[..., None])[..., 0]
        found[:, 0] += average
        return np.asarray(found)


def linear_sums(
    x: np.ndarray, actions: np.ndarray, rewards: np.ndarray, num_actions: int
) -> LinearSums:
    """A client's part: the sums of its log, features x [n, d], actions [n], rewards [n]."""
    sums = LinearSums.empty(num_actions, x.shape[1])
    for action in np.unique(actions):
        taken = actions == action
        sums.gram[action] = x[taken].T @ x[taken]
        sums.moments[action] = x[taken].T @ rewards[taken]
    return sums


Encode = Callable[[Contexts], Features]


def _encoding(split: Split) -> Encode:
    """The features of a linear model: the shared context, over candidates a row for each of them."""
    if split.candidates is None:
        return lambda contexts: contexts.shared
    assert split.catalogue is not None
    items, shared = split.catalogue.features, split.features
    widths = [
        int(f.ids.max(initial=0)) + 1 if isinstance(f, Ragged) else prod(f.shape[1:])
        for f in (shared, items)
    ]
    return candidate_rows(widths[0], widths[1], PARTS if widths[0] else ("item",), _CROSSES)[0]


def choose_columns(
    split: Split, num_actions: int, encode: Encode = lambda contexts: contexts.shared
) -> Columns | None:
    """The columns that vary most, as many as the sums have room for; None if none tells rows apart."""
    count, total, squares = 0, np.zeros(0), np.zeros(0)
    for rows in _blocks(np.arange(split.num_examples)):
        features = encode(split.contexts(rows))
        first, second = _moments(features)
        width = max(len(total), len(first))
        total, squares = (np.pad(s, (0, width - len(s))) for s in (total, squares))
        total[: len(first)] += first
        squares[: len(second)] += second
        count += len(features)
    if not count or not len(total):
        return None
    mean = total / count
    variance = np.maximum(squares / count - mean**2, 0)
    room = min(_MOST_COLUMNS, int(np.sqrt(_MOST_NUMBERS / num_actions)) - 1)
    chosen = np.sort(np.argsort(-variance, kind="stable")[: max(room, 0)])
    chosen = chosen[variance[chosen] > 1e-12 * max(1.0, float(variance.max()))]
    return Columns(chosen, mean[chosen], np.sqrt(variance[chosen])) if len(chosen) else None


def _moments(contexts: Features) -> tuple[np.ndarray, np.ndarray]:
    """Sums and sums of squares of every column; a word stands once in a row."""
    if isinstance(contexts, Ragged):
        values = np.asarray(contexts.values, np.float64)
        return np.bincount(contexts.ids, values), np.bincount(contexts.ids, values**2)
    x = contexts.reshape(len(contexts), -1).astype(np.float64)
    return x.sum(axis=0), (x**2).sum(axis=0)


def linear_rewards(split: Split, num_actions: int) -> RowScores | None:
    """Predicted rewards, linear in the context, from the log of the clients in the other half.

    Fixed actions have coefficients each; candidates share one set, over features of the item, of
    the context and of both. None where there is nothing to look at.
    """
    listed, encode = split.candidates is not None, _encoding(split)
    kinds = 1 if listed else num_actions
    columns = choose_columns(split, kinds, encode)
    if columns is None:
        return None
    log, half = log_of(split), _halves(split)
    actions, rewards = np.asarray(log.actions, np.int64), np.asarray(log.rewards, np.float64)

    def fit(rows: np.ndarray) -> np.ndarray:
        total = LinearSums.empty(kinds, 1 + len(columns.chosen))
        for block in _blocks(rows):
            contexts, chosen = split.contexts(block), actions[block]
            if listed:
                contexts, chosen = contexts.chosen(chosen), np.zeros_like(chosen)
            x = columns.features(encode(contexts))
            total = total + linear_sums(x, chosen, rewards[block], kinds)
        return total.fitted()

    fitted = [fit(np.flatnonzero(half != number)) for number in (0, 1)]

    def predict(rows: np.ndarray) -> np.ndarray:
        contexts, own = split.contexts(rows), half[rows]
        x = columns.features(encode(contexts))
        if listed:
            assert contexts.candidates is not None
            own = np.repeat(own, contexts.candidates.counts)
        both = [x @ coefficients.T for coefficients in fitted]
        found = np.where((own == 0)[:, None], *both)
        return np.asarray(found[:, 0] if listed else found)

    return predict


def estimated_propensities(split: Split, num_actions: int) -> list[np.ndarray]:
    """Probabilities of the logged actions, [n] each: the best estimate, then others as defensible.

    The best one is made for each half of the clients from the other half: linear in the context, if
    contexts tell anything apart, otherwise each action's share; over candidates by how often an
    item is taken where it is shown. The others are the halves' own fits, and plainer ones. An
    estimate that the log decides well hardly differs between them; an interval has to hold under
    each.
    """
    half = _halves(split)
    fits: list[np.ndarray] = _candidate_shares(split, half) if split.candidates is not None else []
    if split.candidates is None:
        fits = [_shares(split, num_actions, half)]
        if (linear := _linear_shares(split, num_actions, half)) is not None:
            fits.insert(0, linear)
    return [_taken(split, fit, half ^ swapped) for swapped in (1, 0) for fit in fits]


def with_estimated_propensities(split: Split, num_actions: int) -> Split:
    """The same log with its propensities replaced by the best estimate of them."""
    best = estimated_propensities(split, num_actions)[0].astype(np.float32)
    return replace(split, log=replace(log_of(split), propensities=best))


def _shares(split: Split, num_actions: int, half: np.ndarray) -> np.ndarray:
    """[2, n, K]: each action's share in the log of either half of the clients."""
    actions = np.asarray(log_of(split).actions)
    counts = np.stack(
        [np.bincount(actions[half == h], minlength=num_actions) + 1.0 for h in (0, 1)]
    )
    shares = counts / counts.sum(axis=1, keepdims=True)
    return np.broadcast_to(shares[:, None], (2, len(actions), num_actions))


def _linear_shares(split: Split, num_actions: int, half: np.ndarray) -> np.ndarray | None:
    """[2, n, K]: probabilities linear in the context, fitted to either half by sums over clients."""
    columns = choose_columns(split, num_actions)
    if columns is None:
        return None
    n = split.num_examples
    x = columns.features(split.shared(np.arange(n)))
    taken = np.zeros((n, num_actions))
    taken[np.arange(n), np.asarray(log_of(split).actions)] = 1
    shares = _shares(split, num_actions, half)
    fitted = []
    for h in (0, 1):
        own, share = x[half == h], shares[h, 0]
        gram = own.T @ own + PRIOR_EVENTS * np.eye(x.shape[1])
        found = share + x @ np.linalg.solve(gram, own.T @ (taken[half == h] - share))
        found = np.maximum(found, _LEAST * share)
        fitted.append(found / found.sum(axis=1, keepdims=True))
    return np.stack(fitted)


def _candidate_shares(split: Split, half: np.ndarray) -> list[np.ndarray]:
    """[2, m] each: how often an item, or a place in the list, is taken where it is shown."""
    items, bounds = _items(split, np.arange(split.num_examples))
    taken = np.zeros(len(items))
    taken[bounds[:-1] + np.asarray(log_of(split).actions)] = 1
    places = np.arange(len(items)) - np.repeat(bounds[:-1], np.diff(bounds))
    owner = np.repeat(half, np.diff(bounds))

    def rates(kind: np.ndarray, h: int) -> np.ndarray:
        own, average = owner == h, taken.mean()
        size = int(kind.max(initial=0)) + 1
        seen = np.bincount(kind[own], minlength=size) + PRIOR_EVENTS
        hits = np.bincount(kind[own], taken[own], minlength=size) + PRIOR_EVENTS * average
        return np.asarray((hits / seen)[kind])

    return [np.stack([rates(kind, h) for h in (0, 1)]) for kind in (items, places)]


def _taken(split: Split, fits: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The probability of each logged action by the fit of the given half, among what was available."""
    rows, actions = np.arange(split.num_examples), np.asarray(log_of(split).actions)
    if split.candidates is None:
        bounds, found = None, fits[which, rows]
    else:
        _, bounds = _items(split, rows)
        found = fits[np.repeat(which, np.diff(bounds)), np.arange(fits.shape[1])]
    mask = available_at(split, rows, fits.shape[-1])
    found = found if mask is None else np.where(mask, found, 0.0)
    return np.asarray(at_actions(found, actions, bounds) / over_actions(found, bounds))


@dataclass(frozen=True, kw_only=True)
class LogColumns:
    """Which columns mean what. Without `client` every row counts as a client of its own."""

    action: str = "action"
    reward: str = "reward"
    propensity: str | None = "propensity"  # None: the table has none
    client: str | None = None
    target: str | None = None  # the evaluated policy's probability of the action taken
    available: str | None = None
    separator: str = "|"


LogTable = tuple[Split, tuple[str, ...], np.ndarray | None]


def read_log_table(table: Table, columns: LogColumns) -> LogTable:
    """The logged decisions of a file or a frame, grouped by client.

    A split without contexts, the names of its actions, and the target column, float64 [n], where
    one was named.
    """
    texts = [
        name for name in (columns.action, columns.client, columns.available) if name is not None
    ]
    numbers = [
        name for name in (columns.reward, columns.propensity, columns.target) if name is not None
    ]
    table.require([*texts, *numbers])
    cells: dict[str, list[str]] = {name: [] for name in texts}
    figures: dict[str, list[np.ndarray]] = {name: [] for name in numbers}
    for batch in table.batches(texts, numbers, progress=SILENT, what="Reading decisions"):
        for name in texts:
            cells[name] += [cell.strip() for cell in batch.texts(name)]
        for name in numbers:
            figures[name].append(batch.exact(name))
    if not cells[columns.action]:
        raise DataError(f"{table.label}: the table has no rows")
    values = {name: np.concatenate(parts) for name, parts in figures.items()}
    limits = {"propensity": (columns.propensity, 0.0), "probability": (columns.target, -1e-12)}
    for what, (column, above) in limits.items():
        found = np.ones(1) if column is None else values[column]
        if len(bad := np.flatnonzero(~((found > above) & (found <= 1)))):
            place = f"{table.label}: column {column}, row {int(bad[0])}"
            raise DataError(f"{place}: a {what} cannot be {found[bad[0]]:g}")
    return _grouped(table.label, columns, cells, values)


def _grouped(
    label: str, columns: LogColumns, cells: dict[str, list[str]], values: dict[str, np.ndarray]
) -> LogTable:
    taken = cells[columns.action]
    sets = (
        [split_labels(cell, columns.separator) for cell in cells[columns.available]]
        if columns.available
        else []
    )
    names = {*taken, *(name for row in sets for name in row)}
    if "" in names:
        raise DataError(
            f"{label}: column {columns.action}, row {taken.index('')}: the action is missing"
        )
    actions = in_natural_order(names)
    code = {name: number for number, name in enumerate(actions)}
    owners = np.array(cells[columns.client] if columns.client else range(len(taken)))
    ids, owner = np.unique(owners, return_inverse=True)
    order = np.argsort(owner, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(ids)))])
    available = (
        _available(f"{label}: column {columns.available}", taken, sets, code)
        if columns.available
        else None
    )
    log = Log(
        actions=np.array([code[name] for name in taken], np.int32)[order],
        rewards=values[columns.reward][order],
        propensities=np.ones(len(taken))
        if columns.propensity is None
        else values[columns.propensity][order],
        available=None if available is None else available.take(order),
    )
    no_labels = Ragged(np.zeros(len(taken) + 1, np.int64), np.empty(0, np.int32))
    names_of_clients = np.array([str(name).encode() for name in ids])
    split = Split(
        names_of_clients, offsets, np.empty((len(taken), 0), np.float32), no_labels, log=log
    )
    target = None if columns.target is None else values[columns.target][order]
    return split, tuple(actions), target


def _available(
    column: str, taken: list[str], sets: list[list[str]], code: dict[str, int]
) -> Ragged:
    """The sets of available actions; an empty cell means that every action was."""
    everything = list(range(len(code)))
    rows = [sorted({code[name] for name in names}) or everything for names in sets]
    for number, (name, could) in enumerate(zip(taken, rows, strict=True)):
        if code[name] not in could:
            raise DataError(
                f"{column}, row {number}: the action that was taken is not among the available ones"
            )
    return Ragged.from_rows(rows)
