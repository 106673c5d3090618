"""The agent an app talks to: choose an action, reward it later, survive crashes, train when
asked.
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.randomness import Purpose, uniforms
from fedbandit.deploy.device.log import (
    EventLog,
    LogUnavailable,
    Outcome,
    Reading,
    Retention,
    Totals,
    read_clocks,
)
from fedbandit.deploy.device.log_arrays import Logged, logged_events, record
from fedbandit.deploy.device.model_files import (
    DeviceModel,
    ModelFiles,
    read_model_file,
    stamp_of,
)
from fedbandit.deploy.device.model_in_use import ModelInUse, make_rule, open_model
from fedbandit.deploy.private_files import make_private_folder
from fedbandit.policies import Policy


def system_uniform() -> float:
    """An unpredictable float64 in [0, 1)."""
    return (int.from_bytes(os.urandom(8), "little") >> 11) * 2.0**-53


@dataclass
class SimulatedDraws:
    """The draws that the simulator makes for one client, so that an agent can be compared with it
    action by action.

    `client` is the client's index in the training split; `time` is the round (simple mode) or the
    period (population mode). Within a time the draws are numbered from 0.
    """

    seed: int
    client: int
    time: int
    position: int = 0

    def start(self, time: int) -> None:
        """Continue with another round or period."""
        self.time, self.position = time, 0

    def __call__(self) -> float:
        drawn = uniforms(self.seed, Purpose.ACTIONS, self.time, self.client, self.position)
        self.position += 1
        return float(drawn)


_logger = logging.getLogger("fedbandit.deploy")


@dataclass(frozen=True)
class Decision:
    """The agent's choice. Show `action`, keep `event_id` until the reward is known."""

    action: int
    name: str
    propensity: float  # the probability with which it was drawn
    model_version: int
    event_id: str | None  # None: the event could not be logged, and `problem` says why
    problem: str | None = None

    @property
    def logged(self) -> bool:
        return self.event_id is not None


class Agent:
    """One decision problem on one device, kept in a folder. Safe for threads, forks and several
    processes.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from fedbandit.deploy import DeviceModel
        >>> model = DeviceModel(  # usually a server sends it
        ...     version=1,
        ...     weights={"weight": np.eye(2, dtype=np.float32), "bias": np.zeros(2, np.float32)},
        ...     actions=("tea", "coffee"),
        ...     kind="dense",
        ...     shape=(2,),
        ...     policy={"name": "greedy"},
        ... )
        >>> with tempfile.TemporaryDirectory() as folder, Agent(folder) as agent:
        ...     installed = agent.install(model)
        ...     decision = agent.choose([0.2, 0.9])
        ...     outcome = agent.reward(decision.event_id, 1.0)  # seconds or days later
        >>> decision.name, decision.propensity, outcome.value
        ('coffee', 1.0, 'recorded')
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        retention: Retention | None = None,
        policy: Policy | None = None,
        on_log_failure: Literal["answer", "raise"] = "answer",
        trusted: Collection[str] = (),
        keep_models: int = 3,
        uniform: Callable[[], float] = system_uniform,
        timeout: float = 5.0,
        power_safe: bool = False,
        clocks: Callable[[], Reading] = read_clocks,
    ) -> None:
        """Open the folder, or make one.

        retention: how long events live and what a missing reward means; without it, the rules the
        log has. policy: explores in place of the policy that comes with the model. on_log_failure:
        when the log cannot be written, choose all the same and say so, or raise. trusted: import
        paths of models and policies of your own that a model file may name. uniform: where draws
        come from; `SimulatedDraws` to compare with a simulation. timeout: seconds to wait for
        another process that is writing. power_safe: wait for the disk at every event, so that even
        a power cut loses none.
        """
        if on_log_failure not in ("answer", "raise"):
            raise ValueError(f"on_log_failure must be 'answer' or 'raise', not {on_log_failure!r}")
        self.folder = Path(folder)
        make_private_folder(self.folder)  # contexts are nobody else's business
        self._models = ModelFiles(self.folder / "models", keep_models)
        self.memory = self.folder / "memory.safetensors"  # what an algorithm remembers here
        path = self.folder / "events.sqlite"
        self._log = EventLog(path, retention, timeout=timeout, power_safe=power_safe, clocks=clocks)
        self._policy, self._trusted, self._uniform = policy, frozenset(trusted), uniform
        self._raises = on_log_failure == "raise"
        self._unlogged = ("", 0)  # why nothing is logged just now, and for how many calls
        # What the files were, the model as it came, and with this device's own weights.
        self._in_use: tuple[object, ModelInUse, ModelInUse] | None = None
        try:
            self._log.totals()  # a damaged log is refused here, not at some decision later
        except LogUnavailable as problem:
            self._not_logged(problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the log's file."""
        self._log.close()

    def choose(
        self, context: object, available: Any = None, candidates: Sequence[Any] | None = None
    ) -> Decision:
        """Choose an action: for a text, a list of words or (word ids, values); or for dense
        features.

        `available` restricts the choice among fixed actions: numbers or names, or one True or False
        for each. A model over items takes `candidates`: names or numbers of items in its catalogue,
        features of items that it has never seen, or both as (name, features). The decision's
        `action` is then a place in that list.
        """
        used = self._used()
        mask, shown = used.available(available), used.shown(candidates)
        encoded = used.encode(context, shown)
        chosen = used.actor.choose(encoded, np.array([self._uniform()]), mask)
        action, propensity = int(chosen.actions[0]), float(chosen.propensities[0])
        event_id, problem, model = None, None, used.model
        try:
            made = record(model, encoded, action, propensity, mask, shown)
            event_id = self._log.append(made)
            self._logged_again()
        except (LogUnavailable, DataError) as failure:
            problem = self._not_logged(failure)
        name = model.actions[action] if shown is None else shown.names[action]
        return Decision(action, name, propensity, model.version, event_id, problem)

    def reward(self, event_id: str | None, value: float) -> Outcome:
        """Record a decision's reward, seconds or days later, in any order; the first one for an
        event counts.
        """
        if event_id is None:
            return Outcome.UNKNOWN
        try:
            return self._log.reward(event_id, value)
        except (LogUnavailable, DataError) as failure:
            self._not_logged(failure)
            return Outcome.NOT_STORED

    def install(self, model: DeviceModel | bytes | Path, *, older: bool = False) -> bool:
        """Use a model from now on; False if it is already in use or older (set `older` to go back
        on purpose).
        """
        if isinstance(model, DeviceModel):
            model = model.to_bytes()
        payload = model if isinstance(model, bytes) else read_model_file(Path(model), "give a file")
        # What cannot act is refused before it is in use.
        open_model(DeviceModel.from_bytes(payload), self._policy, self._trusted)
        return self._models.install(payload, older=older)

    def use(self, version: int) -> None:
        """Go back to an earlier version that is still on the device."""
        self._models.use(version)

    @property
    def model_version(self) -> int | None:
        """The version in use; None before the first."""
        return None if self._models.current() is None else self._used().model.version

    @property
    def model(self) -> DeviceModel:
        """The model in use."""
        return self._used().model

    @property
    def policy(self) -> Policy:
        """The policy that explores with it."""
        return self._used().actor.rule

    def rule_of(self, described: Mapping[str, Any]) -> Policy:
        """The rule that would explore with another model, which names it: the app's own, if it has
        one.
        """
        return self._policy or make_rule(described, self._trusted, "the server")

    def events(self, counted: int = 0) -> Logged:
        """A snapshot of what can be trained on; the app may continue meanwhile, and nothing is
        consumed.

        Events settled after `counted` (the highest `settled` of an earlier snapshot) are marked as
        fresh.
        """
        rows, model = self._log.read(), self._used().model
        own = None if model.catalogue is None else model.catalogue.digest
        catalogues = self._models.catalogues({row.catalogue for row in rows} - {own})
        last = self._log.totals().logged
        found = logged_events(rows, model, counted, last, catalogues)
        if missing := self._log.missing():
            _logger.warning("event log: %d events are missing or not its own", missing)
        return found if not missing else replace(found, damaged=found.damaged + missing)

    def totals(self) -> Totals:
        """Events logged, rewards matched, and what the log holds now."""
        return self._log.totals()

    def retention(self) -> Retention:
        """The rules by which events live."""
        return self._log.retention()

    def _used(self) -> ModelInUse:
        """The model in use, loaded again when another was installed, be it by another process.

        It acts with the device's own weights where the algorithm that trains it makes such.
        """
        stamp, in_use = (self._models.stamp(), stamp_of(self.memory)), self._in_use
        if in_use is not None and in_use[0] == stamp:
            return in_use[2]
        try:
            used = open_model(self._models.load_current(), self._policy, self._trusted)
        except (DataError, OSError) as problem:
            used = self._previous(problem) if in_use is None else in_use[1]
            _logger.warning(
                "acting with model %d: %s", used.model.version, problem
            )  # once: until the next install
        own = used if stamp[1] is None else self._personal(used)
        self._in_use = (stamp, used, own)
        return own

    def _personal(self, used: ModelInUse) -> ModelInUse:
        from fedbandit.deploy.device.training import personal_actor

        try:
            actor = personal_actor(used.actor, used.model, self.memory, self._trusted)
            return replace(used, actor=actor)
        except Exception as problem:  # a user's algorithm may do anything
            _logger.warning("acting without this device's own weights: %s", problem)
            return used

    def _previous(self, problem: DataError | OSError) -> ModelInUse:
        """The model before the one in use, which cannot be used for that reason."""
        try:
            return open_model(self._models.load_previous(), self._policy, self._trusted)
        except DataError:
            raise problem from None

    def _not_logged(self, problem: LogUnavailable | DataError) -> str:
        if self._raises:
            raise problem
        if str(problem) != self._unlogged[0]:  # once, however many choices are made meanwhile
            _logger.warning("event log: %s", problem)
            self._unlogged = (str(problem), 0)
        self._unlogged = (self._unlogged[0], self._unlogged[1] + 1)
        return str(problem)

    def _logged_again(self) -> None:
        """After a time without room: say for how many calls it lasted."""
        if self._unlogged[1]:
            _logger.warning("event log: works again; %d calls were not kept", self._unlogged[1])
            self._unlogged = ("", 0)
