"""The server's folder: state, privacy ledger, models and metrics, written so that a kill loses
nothing.

A generation of the state is files named with their checksums by one commit of the database. The
ledger of a private deployment only grows: each round is charged before anybody can see it.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.files import (
    keep_names,
    last_lines,
    lines_in,
    object_in,
    open_regular,
    pack,
    read_object,
    read_packed,
    unpack,
    write_bytes,
)
from fedbandit.deploy.messages import is_count
from fedbandit.deploy.private_files import held_alone
from fedbandit.deploy.server import database
from fedbandit.deploy.server.database import Database, Generation, Mark
from fedbandit.deploy.server.deployment import Deployment
from fedbandit.federated.state import DamagedState, State, read_state, state_bytes

_logger = logging.getLogger("fedbandit.deploy.server")
LEDGER = "ledger.jsonl"
_OWN_FILE = re.compile(r"(state|noise|model)-\d+\.safetensors")
_UNFINISHED = re.compile(r"\.(state|noise|model)-\d+\.safetensors\..*\.tmp")
_LONGEST_LINE = 2**20  # bytes of metrics
_LONGEST_ENTRY = 1024  # bytes in which a line of the ledger ends
_SCALARS = ("round", "clip_norm", "reward_total", "rewarded_rounds", "events", "extra")


@contextmanager
def reading(path: Path | str, otherwise: str) -> Iterator[None]:
    """Turn errors of the block into one line that names the file; `otherwise` says what to do."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {otherwise}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({str(error)[:100]}); {otherwise}") from None


@dataclass(frozen=True)
class Kept:
    """A state that a server resumes from, with the memory of its noise (none without privacy)."""

    state: State
    memory: dict[int, np.ndarray]  # of the noise
    lost_step: bool = False  # the newest state was damaged: the weights are of the round before


class Store:
    """Keeps a deployment's state. One server at a time: the folder is locked while it is open.

    `server.sqlite` holds marks of devices and names the files of the newest state and of the one
    before it: `state-N.safetensors`, and `noise-N.safetensors` where noise has a memory.
    `ledger.jsonl` says what a private deployment has spent. Behind the commit come `models/` and
    `metrics.jsonl`, which `publish` brings up to it after a crash.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # a private deployment keeps the memory of its noise here
        try:
            (folder / "models").mkdir(exist_ok=True)
        except FileExistsError:
            raise DataError(f"{folder / 'models'}: is not a folder; move it away") from None
        used = f"{folder}: another server is using this folder"
        self._lock: int | None = held_alone(folder / "lock", used)
        self._database: Database | None = None
        self._newest = self._sound = self._tried = 0  # generations: committed, whole, tried last
        self._known: dict[str, int] = {"devices": 0, "names": 0}
        self._released = 0  # the last private round that anybody may have seen
        self._looked = False  # whether models and metrics have been compared with the state

    def close(self) -> None:
        """Let another server use the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def database(self) -> Database:
        """The memory of devices and nodes, after `load` or the first checkpoint."""
        assert self._database is not None
        return self._database

    def marks(self, names: Iterable[str]) -> dict[str, Mark]:
        """The marks of these devices, of those that are known."""
        return self.database.marks(names)

    def load(self) -> Kept | None:
        """The last state, with the memory of its noise; None before the first.

        If the newest state is damaged, the one before takes its place. Whatever cannot be read
        stays where it is.
        """
        path = self.folder / database.NAME
        if not path.exists():
            self._refuse_remains()
            return None
        self._database = Database(path)
        self._database.check()
        newest, *earlier = self._database.generations()
        self._newest = self._sound = self._tried = newest.number
        self._known = {name: newest.facts[name] for name in self._known}
        self._check_ledger(newest)
        memory = _read_memory(self.folder, newest)
        try:
            return Kept(_read_arrays(self.folder, newest), memory)
        except DamagedState as damage:
            return Kept(self._fallen_back(newest, earlier, damage), memory, lost_step=True)

    def checkpoint(
        self,
        state: State,
        memory: Mapping[int, np.ndarray],
        marks: Mapping[str, Mark] | None = None,
        nodes: Mapping[int, str] | None = None,
        held: Mapping[int, int] | None = None,
    ) -> None:
        """From here on the round has happened: a commit names its files with their checksums.

        `marks` are the round's new marks of devices, `nodes` the nodes that turned out to be other
        devices than before, `held` the models that nodes say they hold.
        """
        self._tried = number = self._tried + 1  # never that of a file that was perhaps committed
        files = _write_files(self.folder, number, state, memory)
        scalars = {name: getattr(state, name) for name in _SCALARS}
        facts = {**scalars, "deployed": sorted(state.deployed), **self._known}
        generation, private = Generation(number, files, facts), is_private(state.extra)
        if private and state.round > self._released:
            _append(self.folder / LEDGER, state.round, "charged")
        if self._database is None:
            self._database = database.create(self.folder / database.NAME, generation)
        else:
            known = self._database.commit(
                generation, marks or {}, nodes or {}, self._newest, self._sound, held
            )
            self._known = dict(zip(self._known, known, strict=True))
        self._newest = self._sound = number
        if private:
            self._release(state.round)

    def publish(self, state: State, deployment: Deployment) -> None:
        """Bring models and metrics up to the checkpoint; does nothing where they are."""
        for version, deployed in state.deployed.items():
            path = self.model_path(version)
            if not path.exists() or not self._looked:
                payload = deployment.device_model(deployed, version).to_bytes()
                if _read(path) != payload:
                    write_bytes(path, payload)
        last, metrics = state.extra.get("last_metrics"), self.folder / "metrics.jsonl"
        reached = self._last_round_in_metrics()
        if reached > state.round:
            raise DataError(
                f"{metrics}: goes to round {reached}, the state only to round {state.round};"
                " restore the newer state, or use a new folder"
            )
        if last is not None and reached < last["round"]:
            with open(metrics, "ab") as file:
                file.write((json.dumps(last) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        self._looked = True
        self._tidy(state)

    def model_path(self, version: int) -> Path:
        """The file of a deployed version, as devices receive it."""
        return self.folder / "models" / f"model-{version}.safetensors"

    def rollback_asked(self) -> int | None:
        """The version that an operator wants back; a damaged request is named and set aside."""
        try:
            return read_rollback(self.folder)
        except DataError as problem:
            _logger.error("%s", problem)
            with suppress(OSError):
                os.replace(self.folder / "rollback.json", self.folder / "rollback-refused.json")
            return None

    def rollback_done(self) -> None:
        """Remove the request for a rollback."""
        (self.folder / "rollback.json").unlink(missing_ok=True)

    def witnessed(self, number: int) -> None:
        """Keep that devices know of this many released rounds: no older state is continued."""
        _append(self.folder / LEDGER, number, "witnessed")

    def _fallen_back(
        self, newest: Generation, earlier: list[Generation], damage: DamagedState
    ) -> State:
        """The state before, with what the newest says of rounds, rewards and devices."""
        if not earlier:
            raise DataError(
                f"{damage}; there is no earlier state to fall back to; restore it from a copy"
            ) from None
        try:
            state = _read_arrays(self.folder, earlier[0])
        except DamagedState as other:
            raise DataError(f"{damage}; {other}; restore one of them from a copy") from None
        with suppress(FileNotFoundError):
            name = f"state-{newest.number}.safetensors"
            os.replace(self.folder / name, self.folder / f"damaged-{name}")
        self._sound = earlier[0].number
        _logger.error(
            "%s; falling back to the state before it: the step of round %d is lost",
            damage,
            newest.facts["round"],
        )
        return replace(state, **{name: newest.facts[name] for name in _SCALARS})

    def _check_ledger(self, newest: Generation) -> None:
        """Refuse a private state older than what was released, or that nothing was charged for."""
        if not is_private(newest.facts["extra"]):
            return
        path, reached = self.folder / LEDGER, newest.facts["round"]
        spent = read_ledger(path)
        if spent is None and reached:
            raise DataError(
                f"{path}: is gone, and with it what {reached} private rounds have spent; restore it"
            )
        spent = spent or Spent()
        if spent.charged < reached:
            raise DataError(
                f"{path}: ends at round {spent.charged}, the state is of round {reached};"
                " restore it"
            )
        if spent.released > reached:
            raise DataError(
                f"{path}: round {spent.released} was released, and the state is of round {reached}:"
                " an old copy? Restore the newer state"
            )
        self._released = spent.released
        self._release(reached)

    def _release(self, number: int) -> None:
        """Say that a private round may be seen from now on, before anybody can see it."""
        if number > self._released:
            _append(self.folder / LEDGER, number, "released")
            self._released = number

    def _refuse_remains(self) -> None:
        """A folder in which rounds have been run is not a new deployment, whatever is missing."""
        names = (f"{database.NAME}-journal", LEDGER, "metrics.jsonl")
        paths = [path for name in names if (path := self.folder / name).exists()]
        found = [path.name for path in paths if path.stat().st_size > 0 or not path.is_file()]
        models = sorted((self.folder / "models").glob("model-*.safetensors"))
        states = sorted(self.folder.glob("state-*.safetensors"))
        found += [path.name for path in (*models, *states) if path.stem != "state-1"]
        if found:
            raise DataError(
                f"{self.folder}: {database.NAME} is missing, but {found[0]} is here: this"
                f" deployment has run before; restore {database.NAME}, or use a new folder"
            )

    def _tidy(self, state: State) -> None:
        """Remove what the state no longer names, and what killed writers have left."""
        named = {name for generation in self.database.generations() for name in generation.files}
        named |= {self.model_path(version).name for version in state.deployed}
        for path in (*self.folder.iterdir(), *(self.folder / "models").iterdir()):
            own = _OWN_FILE.fullmatch(path.name) and path.name not in named
            if not own and not _UNFINISHED.fullmatch(path.name):
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _logger.warning(
                    "%s: not needed any more, and cannot be removed: %s", path, error.strerror
                )

    def _last_round_in_metrics(self) -> int:
        """The round of the last line; half a line that a crash can leave behind it is removed."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return 0
        again = "its last line is not that of a round; remove it, and the server writes it again"
        with reading(path, again):
            lines = last_lines(path)
            number = object_in(lines[-1])["round"] if lines else 0
            if not is_count(number):
                raise ValueError("its round is not a count")
        with open(path, "r+b") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE)
            file.seek(start)
            file.truncate(start + file.read().rfind(b"\n") + 1)
        return int(number)


def read_facts(folder: Path) -> dict[str, Any]:
    """Everything of a folder's newest state that is not an array; its server may be running."""
    path = folder / database.NAME
    if not path.exists():
        raise DataError(
            f"{folder}: not the state folder of a deployment (`state` in its TOML file)"
        )
    return dict(Database(path).generations()[0].facts)


def is_private(extra: Mapping[str, Any]) -> bool:
    """Whether a state is that of a private deployment."""
    return extra["promises"].get("privacy") is not None


def read_rollback(folder: Path) -> int | None:
    """The version that a rollback was requested to; None: there is no such request."""
    path = folder / "rollback.json"
    with reading(path, "ask for the rollback again"), suppress(FileNotFoundError):
        version = read_object(path)["version"]
        if type(version) is not int:
            raise ValueError(f"version is {str(version)[:20]}")
        return version
    return None


@dataclass(frozen=True)
class Spent:
    """The end of a ledger: its last charged and released rounds."""

    charged: int = 0  # the last charged round; if it did not come about, it is charged again
    released: int = 0  # the last round that anybody may have seen
    link: str = ""  # what the next line continues


def read_ledger(path: Path) -> Spent | None:
    """The end of the ledger, None if there is none; refuses a line that was not written."""
    spent = Spent()
    copy = "restore the file from a copy"
    with reading(path, copy), suppress(FileNotFoundError), open_regular(path) as file:
        for number, line in enumerate(lines_in(file), start=1):  # what has no end was not completed
            with reading(f"{path}: line {number}", copy):
                spent = _after(spent, line)
        return spent
    return None


def _append(path: Path, number: int, what: Literal["charged", "released", "witnessed"]) -> None:
    """Put one more line on disk, for good, before this returns; `witnessed`: devices say so."""
    body = json.dumps({"round": number, "what": what})
    with open(path, "ab+") as file:
        os.fchmod(file.fileno(), 0o600)
        start = max(0, file.seek(0, os.SEEK_END) - _LONGEST_ENTRY)
        file.seek(start)
        complete, newline, _ = file.read().rpartition(b"\n")
        file.truncate(start + len(complete + newline))  # half a line of a server that was killed
        before = object_in(complete.rpartition(b"\n")[2])["link"] if complete else ""
        file.write(f'{{"entry": {body}, "link": "{_link(before, body)}"}}\n'.encode())
        file.flush()
        os.fsync(file.fileno())
    keep_names(path.parent)


def _after(before: Spent, line: bytes) -> Spent:
    found = object_in(line)
    number, what = found["entry"]["round"], found["entry"]["what"]
    if found["link"] != _link(before.link, json.dumps(found["entry"])):
        raise ValueError("it does not continue the line before")
    if what == "charged":
        return Spent(number, before.released, found["link"])
    return Spent(max(number, before.charged), number, found["link"])


def _link(before: str, body: str) -> str:
    return hashlib.sha256(f"{before}{body}".encode()).hexdigest()[:16]


def _write_files(
    folder: Path, number: int, state: State, memory: Mapping[int, np.ndarray]
) -> dict[str, str]:
    """Put a generation's files on disk; their names, with their checksums.

    The noise has a file of its own: it may survive where the weights do not.
    """
    payloads = {f"state-{number}.safetensors": state_bytes(state)}
    if memory:
        noise = {str(at): value for at, value in memory.items()}
        payloads[f"noise-{number}.safetensors"] = pack(noise, {})
    for name, payload in payloads.items():
        write_bytes(folder / name, payload)
    return {name: hashlib.sha256(payload).hexdigest() for name, payload in payloads.items()}


def _read_arrays(folder: Path, generation: Generation) -> State:
    """The state as it was written; `DamagedState` where that is lost."""
    name = f"state-{generation.number}.safetensors"
    return read_state(_bytes(folder, generation, name), folder / name)


def _read_memory(folder: Path, generation: Generation) -> dict[int, np.ndarray]:
    """The memory of the noise, which nothing can replace."""
    name = f"noise-{generation.number}.safetensors"
    if name not in generation.files:
        return {}
    try:
        return {int(at): value for at, value in unpack(_bytes(folder, generation, name))[0].items()}
    except (DamagedState, ValueError) as damage:
        raise DataError(
            f"{damage}; without this memory of the noise no round is as private as promised;"
            " restore the file from a copy"
        ) from None


def _bytes(folder: Path, generation: Generation, name: str) -> bytes:
    """The bytes that were written under that name."""
    path = folder / name
    payload = _read(path)
    if payload is None and not path.exists():
        raise DamagedState(f"{path}: is gone")
    if payload is None or hashlib.sha256(payload).hexdigest() != generation.files[name]:
        raise DamagedState(f"{path}: damaged: its checksum does not match")
    return payload


def _read(path: Path) -> bytes | None:
    """The bytes of a file; None where it is missing or not one of ours.

    One that cannot be read says nothing about what was written.
    """
    with reading(path, "restore it from a copy"), suppress(FileNotFoundError, ValueError):
        return read_packed(path)
    return None
