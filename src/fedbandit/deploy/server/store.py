"""The server's folder: state, models, metrics, requests of the operator, and what `deploy status` reads from it."""

import fcntl
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.files import (
    last_lines,
    object_in,
    read_lines,
    read_object,
    write_bytes,
    write_json,
)
from fedbandit.deploy.server import database, ledger
from fedbandit.deploy.server.database import Database, Generation, Mark
from fedbandit.deploy.server.deployment import Deployment
from fedbandit.deploy.server.state_files import (
    facts_of,
    read_arrays,
    read_memory,
    with_facts,
    write_files,
)
from fedbandit.federated.state import DamagedState, State
from fedbandit.privacy.reporting import in_one_line

_logger = logging.getLogger("fedbandit.deploy.server")
_OWN_FILE = re.compile(r"(state|noise|model)-\d+\.safetensors")
_UNFINISHED = re.compile(r"\.(state|noise|model)-\d+\.safetensors\..*\.tmp")
_LONGEST_LINE = 2**20  # bytes of metrics


@dataclass(frozen=True)
class Kept:
    """What a server resumes from."""

    state: State
    memory: dict[int, np.ndarray]  # of the noise
    lost_step: bool = False  # the round has happened, but its state was damaged: the weights are of the round before


class Store:
    """Keeps a deployment's state. One server at a time: the folder is locked while it is open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # a private deployment keeps the memory of its noise here
        (folder / "models").mkdir(exist_ok=True)
        self._lock: int | None = _locked(folder / "lock")
        self._database: Database | None = None
        self._newest = self._sound = self._tried = (
            0  # generations: committed last, read or written whole, tried last
        )
        self._devices = 0
        self._released = 0  # the last private round that anybody may have seen
        self._looked = False  # whether models and metrics have been compared with the state

    def close(self) -> None:
        """Let another server use the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def marks(self, names: Iterable[str]) -> dict[str, Mark]:
        """What is remembered of these devices, of those that are known."""
        assert self._database is not None, (
            "nothing is remembered before `load` or the first checkpoint"
        )
        return self._database.marks(names)

    def devices(self, nodes: Iterable[int]) -> dict[int, str]:
        """Which devices these nodes were when they last took part, of those that have."""
        assert self._database is not None, (
            "nothing is remembered before `load` or the first checkpoint"
        )
        return self._database.devices(nodes)

    def load(self) -> Kept | None:
        """The last state, and the memory of the noise that goes with it; None before the first.

        If the newest state is damaged, the one before takes its place. Whatever cannot be read stays where it is.
        """
        path = self.folder / database.NAME
        if not path.exists():
            self._refuse_remains()
            return None
        self._database = Database(path)
        self._database.check()
        newest, *earlier = self._database.generations()
        self._newest = self._sound = self._tried = newest.number
        self._devices = newest.facts["devices"]
        self._check_ledger(newest)
        memory = read_memory(self.folder, newest)
        try:
            return Kept(read_arrays(self.folder, newest), memory)
        except DamagedState as damage:
            return Kept(self._fallen_back(newest, earlier, damage), memory, lost_step=True)

    def checkpoint(
        self,
        state: State,
        memory: Mapping[int, np.ndarray],
        marks: Mapping[str, Mark] | None = None,
        nodes: Mapping[int, str] | None = None,
    ) -> None:
        """From here on the round has happened: the files are on disk, and a commit names them with their checksums.

        `marks` are the round's new marks of devices, `nodes` the nodes that turned out to be other devices than before.
        """
        self._tried = number = (
            self._tried + 1
        )  # never the number of a file that may have been committed
        files = write_files(self.folder, number, state, memory)
        generation = Generation(number, files, facts_of(state, self._devices))
        private = _is_private(state.extra)
        if private and state.round > self._released:
            ledger.append(self.folder / ledger.NAME, state.round, "charged")
        if self._database is None:
            self._database = database.create(self.folder / database.NAME, generation)
        else:
            self._devices = self._database.commit(
                generation, marks or {}, nodes or {}, self._newest, self._sound
            )
        self._newest = self._sound = number
        if private:
            self._release(state.round)

    def publish(self, state: State, deployment: Deployment) -> None:
        """Bring models and metrics up to the checkpoint; does nothing where they are."""
        for version, deployed in state.deployed.items():
            path = self.model_path(version)
            if not path.exists() or not self._looked:
                payload = deployment.device_model(deployed, version).to_bytes()
                if not path.exists() or path.read_bytes() != payload:
                    write_bytes(path, payload)
        last = state.extra.get("last_metrics")
        reached = self._last_round_in_metrics()
        if reached > state.round:
            problem = f"goes to round {reached}, the state only to round {state.round}"
            raise DataError(
                f"{self.folder / 'metrics.jsonl'}: {problem}; restore the newer state, or use a new folder"
            )
        if last is not None and reached < last["round"]:
            with open(self.folder / "metrics.jsonl", "ab") as file:
                file.write((json.dumps(last) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        self._looked = True
        self._tidy(state)

    def model_path(self, version: int) -> Path:
        return self.folder / "models" / f"model-{version}.safetensors"

    def rollback_asked(self) -> int | None:
        """The version that an operator wants back; a request that makes no sense is named and set aside."""
        try:
            return read_rollback(self.folder)
        except DataError as problem:
            _logger.error("%s", problem)
            with suppress(OSError):
                os.replace(self.folder / "rollback.json", self.folder / "rollback-refused.json")
            return None

    def rollback_done(self) -> None:
        (self.folder / "rollback.json").unlink(missing_ok=True)

    def _fallen_back(
        self, newest: Generation, earlier: list[Generation], damage: DamagedState
    ) -> State:
        """The state before, with all that the newest one says about rounds, rewards and devices: that has happened."""
        if not earlier:
            raise DataError(
                f"{damage}; there is no earlier state to fall back to; restore it from a copy"
            ) from None
        try:
            state = read_arrays(self.folder, earlier[0])
        except DamagedState as other:
            raise DataError(f"{damage}; {other}; restore one of them from a copy") from None
        with suppress(FileNotFoundError):
            name = f"state-{newest.number}.safetensors"
            os.replace(self.folder / name, self.folder / f"damaged-{name}")
        self._sound = earlier[0].number
        number = newest.facts["round"]
        _logger.error(
            "%s; falling back to the state before it: the step of round %d is lost", damage, number
        )
        return with_facts(state, newest)

    def _check_ledger(self, newest: Generation) -> None:
        """Refuse a private state that is older than what was released, or that nothing was charged for."""
        if not _is_private(newest.facts["extra"]):
            return
        path, reached = self.folder / ledger.NAME, newest.facts["round"]
        spent = ledger.read_ledger(path)
        if spent is None and reached:
            raise DataError(
                f"{path}: is gone, and with it what {reached} private rounds have spent; restore it"
            )
        spent = spent or ledger.Spent()
        if spent.charged < reached:
            raise DataError(
                f"{path}: ends at round {spent.charged}, the state is of round {reached}; restore it"
            )
        if spent.released > reached:
            problem = f"round {spent.released} was released, and the state is of round {reached}"
            raise DataError(f"{path}: {problem}: an old copy? Restore the newer state")
        self._released = spent.released
        self._release(reached)

    def _release(self, number: int) -> None:
        """Say that a private round may be seen from now on, before anybody can see it."""
        if number > self._released:
            ledger.append(self.folder / ledger.NAME, number, "released")
            self._released = number

    def witnessed(self, number: int) -> None:
        """Keep that devices know of so many released rounds: no server continues from an older state than that."""
        ledger.append(self.folder / ledger.NAME, number, "witnessed")

    def _refuse_remains(self) -> None:
        """A folder in which rounds have been run is not a new deployment, whatever is missing."""
        names = (f"{database.NAME}-journal", ledger.NAME, "metrics.jsonl")
        found = [name for name in names if _is_something(self.folder / name)]
        found += [
            path.name for path in sorted((self.folder / "models").glob("model-*.safetensors"))
        ]
        found += [
            path.name
            for path in sorted(self.folder.glob("state-*.safetensors"))
            if path.stem != "state-1"
        ]
        if found:
            problem = f"{database.NAME} is missing, but {found[0]} is here: this deployment has run before"
            raise DataError(
                f"{self.folder}: {problem}; restore {database.NAME}, or use a new folder"
            )

    def _tidy(self, state: State) -> None:
        """Remove what the state no longer names, and what writers that were killed have left; damaged files stay."""
        assert self._database is not None
        named = {name for generation in self._database.generations() for name in generation.files}
        named |= {self.model_path(version).name for version in state.deployed}
        outdated = [
            path
            for path in (*self.folder.iterdir(), *(self.folder / "models").iterdir())
            if (_OWN_FILE.fullmatch(path.name) and path.name not in named)
            or _UNFINISHED.fullmatch(path.name)
        ]
        for path in outdated:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _logger.warning(
                    "%s: not needed any more, and cannot be removed: %s", path, error.strerror
                )

    def _last_round_in_metrics(self) -> int:
        """The round of the last line, once the half line is gone that a crash can leave behind it."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return 0
        try:
            lines = last_lines(path)
            number = object_in(lines[-1])["round"] if lines else 0
            if type(number) is not int or number < 0:
                raise ValueError("its round is not a count")
        except (ValueError, KeyError) as error:
            problem = f"its last line is not that of a round ({str(error)[:100]})"
            raise DataError(
                f"{path}: {problem}; remove the line, and the server writes it again"
            ) from None
        with open(path, "r+b") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE)
            file.seek(start)
            file.truncate(start + file.read().rfind(b"\n") + 1)
        return number


def _is_private(extra: Mapping[str, Any]) -> bool:
    return extra["promises"].get("privacy") is not None


def _figures(extra: Mapping[str, Any]) -> str:
    """What a deployment says of its rewards."""
    if not _is_private(extra):
        return "exact"
    return (
        "noised"
        if (extra["promises"].get("private figures") or {}).get("figures_share")
        else "not reported"
    )


def _is_something(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


@dataclass(frozen=True)
class Summary:
    """What can be said of a state without its arrays."""

    round: int
    clip_norm: float
    running_reward: float | None
    deployed: list[int]  # versions
    devices: int  # that ever took part
    extra: Mapping[str, Any]


def read_summary(folder: Path) -> Summary:
    """The state of a folder; the server may be running meanwhile."""
    path = folder / database.NAME
    if not path.exists():
        raise DataError(
            f"{folder}: not the state folder of a deployment (`state` in its TOML file)"
        )
    facts = Database(path).generations()[0].facts
    rounds = facts["rewarded_rounds"]
    reward = facts["reward_total"] / rounds if rounds else None
    return Summary(
        facts["round"],
        facts["clip_norm"],
        reward,
        facts["deployed"],
        facts["devices"],
        facts["extra"],
    )


def ask_rollback(folder: Path, version: int) -> None:
    """Have the server of that folder go back to a version, at its next round or when it starts."""
    known = read_summary(folder).deployed
    if version not in known:
        raise DataError(f"{folder}: version {version} is not kept; there are {known}")
    write_json(folder / "rollback.json", {"version": version})


def read_rollback(folder: Path) -> int | None:
    """The version that a rollback was requested to."""
    path = folder / "rollback.json"
    try:
        version = read_object(path)["version"]
        if type(version) is not int:
            raise ValueError(f"version is {str(version)[:20]}")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except (KeyError, ValueError) as error:
        raise DataError(
            f"{path}: damaged ({str(error)[:100]}); ask for the rollback again"
        ) from None
    return version


def _locked(path: Path) -> int:
    """An open file that nobody else can lock; the system releases it when the process ends, however it ends."""
    held = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ConfigError(f"{path.parent}: another server is using this folder") from None
    return held


_RECENT = 10  # rounds that "lately" looks at


def read_status(folder: Path) -> dict[str, Any]:
    """The deployment's state as plain values; the server may be running meanwhile."""
    state = read_summary(folder)
    private = _is_private(state.extra)
    lines = _metrics(folder)
    recent = lines[-_RECENT:]
    last = lines[-1] if lines else {}
    refused: dict[str, int] = {}
    for line in () if private else lines:
        for kind, count in line["refused"].items():
            refused[kind] = refused.get(kind, 0) + count
    return {
        "round": state.round,
        "devices": None if private else state.devices,
        "participation": None
        if private
        else {
            "rounds": len(recent),
            "asked": sum(line["asked"] for line in recent),
            "reported": sum(line["clients"] for line in recent),
            "idle": sum(line["idle"] for line in recent)
            if all(line["idle"] is not None for line in recent)
            else None,
            "refused": sum(sum(line["refused"].values()) for line in recent),
        },
        "refused": dict(sorted(refused.items())),
        "reward": {
            "running": last.get("running_reward") if private else state.running_reward,
            "figures": _figures(state.extra),
            "lately": _mean_reward(recent),
            "by_version": _by_version(lines),
        },
        "privacy": (state.extra.get("privacy") or "no round since an update") if private else None,
        "gate": _gate(lines),
        "secure_aggregation": bool(state.extra.get("promises", {}).get("secure aggregation")),
        "clip_norm": state.clip_norm,
        "model_version": max(state.deployed),
        "kept_versions": sorted(state.deployed),
        "versions": state.extra.get("versions", []),
        "rollback_asked": read_rollback(folder),
    }


def in_lines(status: dict[str, Any]) -> list[str]:
    """The same as lines for a terminal."""
    part, reward = status["participation"], status["reward"]
    spent = status["privacy"] or {"mechanism": "none"}
    lines = [
        f"round          {status['round']}",
        *_participation(part, status["devices"]),
        f"reward         {_rewards(reward)}",
        f"privacy        {spent if isinstance(spent, str) else in_one_line(spent)}",
        "aggregation    "
        + (
            "secure: only sums are seen here"
            if status["secure_aggregation"]
            else "plain: each report is seen here"
        ),
        f"clip norm      {status['clip_norm']:.4g}",
        f"model          version {status['model_version']}; kept: {', '.join(map(str, status['kept_versions']))}",
    ]
    if status["gate"] is not None:
        lines.append(f"gate           {_judged(status['gate'])}")
    for entry in status["versions"][-_RECENT:]:
        earned = _shown(reward["by_version"].get(entry["version"]))
        lines.append(
            f"  version {entry['version']:<4} after round {entry['round']:<5} reward {earned}  {entry['why']}"
        )
    if status["refused"]:
        lines.append(
            "refused        "
            + ", ".join(f"{kind} {count}" for kind, count in status["refused"].items())
        )
    if status["rollback_asked"] is not None:
        lines.append(
            f"asked for      going back to model {status['rollback_asked']}, at the next round"
        )
    return lines


def _participation(part: dict[str, Any] | None, devices: int | None) -> list[str]:
    if part is None:
        return [
            "participation  not said: epsilon holds for those who do not know how many took part"
        ]
    idle = "" if part["idle"] is None else f" {part['idle']} had nothing to train on,"
    return [
        f"devices seen   {devices}",
        f"participation  {part['reported']} reports of {part['asked']} asked in the last"
        f" {part['rounds']} rounds;{idle} {part['refused']} were refused",
    ]


def _metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    try:
        lines = read_lines(path)
    except ValueError as error:
        raise DataError(
            f"{path}: a line is not that of a round ({str(error)[:100]}); remove it"
        ) from None
    for number, line in enumerate(lines, start=1):
        counts = [line.get(name) for name in ("round", "model_version")]
        counts += [  # null in private rounds
            line.get(name, "missing")
            for name in ("asked", "clients", "idle", "events")
            if line.get(name, 0) is not None
        ]
        if not (
            all(type(count) is int for count in counts)
            and isinstance(line.get("refused", "missing"), dict | None)
        ):
            raise DataError(f"{path}: line {number} is not that of a round; remove it")
    return lines


def _mean_reward(lines: list[dict[str, Any]]) -> float | None:
    events, rewards = (
        (sum(column) for column in zip(*map(_sums_of, lines), strict=True)) if lines else (0, 0.0)
    )
    return rewards / events if events > 0 else None


def _sums_of(line: dict[str, Any]) -> tuple[float, float]:
    """Events and rewards of a round; of a private one as they were released, with noise, or nothing."""
    events = line["events"] or 0
    return events, line.get("reward_sum", (line["reward"] or 0.0) * events)


def _by_version(lines: list[dict[str, Any]]) -> dict[int, float | None]:
    """The reward of the events that each version chose; where devices hide which, of those reported while it was."""
    sums: dict[int, tuple[float, float]] = {line["model_version"]: (0, 0.0) for line in lines}
    for line in lines:
        whole = {str(line["model_version"]): _sums_of(line)}
        for version, (events, rewards) in (line.get("rewards_by_version") or whole).items():
            before = sums.get(int(version), (0, 0.0))
            sums[int(version)] = before[0] + events, before[1] + rewards
    return {
        version: rewards / events if events > 0 else None
        for version, (events, rewards) in sums.items()
    }


def _gate(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The last verdict on a model, with its round, and how many there were; None where nothing was judged."""
    judged = [line for line in lines if "gate" in line]
    if not judged:
        return None
    held_back = sum(not line["gate"]["passes"] for line in judged)
    return {
        "round": judged[-1]["round"],
        **judged[-1]["gate"],
        "judged": len(judged),
        "held_back": held_back,
    }


def _judged(gate: dict[str, Any]) -> str:
    done = "let the model pass" if gate["passes"] else "held the model back"
    return (
        f"{done} after round {gate['round']}: gain {_shown(gate['gain'])}, at least {_shown(gate['lower'])},"
        f" by {gate['devices']} devices; {gate['held_back']} of {gate['judged']} held back so far"
    )


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _rewards(reward: dict[str, Any]) -> str:
    if reward["figures"] == "not reported":
        return "not reported: no part of the privacy budget pays for it (privacy.figures_share)"
    noised = ", with noise" if reward["figures"] == "noised" else ""
    return f"{_shown(reward['running'])} over all rounds, {_shown(reward['lately'])} lately{noised}"
