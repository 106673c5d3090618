"""The server's folder: one checkpoint that is the truth, and what is derived from it: metrics, models, a log.

A round has happened when its checkpoint has its name; everything else can be made again from it after a crash.
"""

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedbandit.deploy.flower.deployment import Deployment
from fedbandit.errors import ConfigError, DataError
from fedbandit.files import write_bytes, write_json
from fedbandit.simulation.state import State, load_state, save_state

_NOISE = "noise/"
_LONGEST_LINES = 2**20  # bytes in which at least one whole line of metrics ends


class Store:
    """Keeps a deployment's state. One server at a time: the folder is locked while it is open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # a private deployment keeps the memory of its noise here
        (folder / "models").mkdir(exist_ok=True)
        self._lock: int | None = _locked(folder / "lock")

    def close(self) -> None:
        """Let another server use the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def load(self) -> tuple[State, dict[int, np.ndarray]] | None:
        """The last checkpoint, and the memory of the noise that goes with it; None before the first."""
        path = self.folder / "state.safetensors"
        if not path.exists():
            return None
        state = load_state(path)
        memory = {int(k.removeprefix(_NOISE)): v for k, v in state.optimizer.items() if k.startswith(_NOISE)}
        optimizer = {k: v for k, v in state.optimizer.items() if not k.startswith(_NOISE)}
        return replace(state, optimizer=optimizer), memory

    def checkpoint(self, state: State, memory: dict[int, np.ndarray]) -> None:
        """From here on the round has happened."""
        noise = {f"{_NOISE}{number}": value for number, value in memory.items()}
        save_state(replace(state, optimizer={**state.optimizer, **noise}), self.folder / "state.safetensors")

    def publish(self, state: State, deployment: Deployment) -> None:
        """Bring models and metrics up to the checkpoint; does nothing where they are."""
        for version, weights in state.deployed.items():
            path = self.model_path(version)
            if not path.exists():
                write_bytes(path, deployment.device_model(weights, version).to_bytes())
        kept = {self.model_path(version) for version in state.deployed}
        for path in (self.folder / "models").glob("model-*.safetensors"):
            if path not in kept:
                path.unlink(missing_ok=True)
        last = state.extra.get("last_metrics")
        if last is not None and self._last_round_in_metrics() < last["round"]:
            with open(self.folder / "metrics.jsonl", "ab") as file:
                file.write((json.dumps(last) + "\n").encode())

    def model_path(self, version: int) -> Path:
        return self.folder / "models" / f"model-{version}.safetensors"

    def rollback_asked(self) -> int | None:
        """The version that an operator wants back."""
        return read_rollback(self.folder)

    def rollback_done(self) -> None:
        (self.folder / "rollback.json").unlink(missing_ok=True)

    def _last_round_in_metrics(self) -> int:
        """The round of the last line, once the half line is gone that a crash can leave behind it."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return 0
        with open(path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - _LONGEST_LINES)
            file.seek(start)
            tail = file.read()
            whole = tail[: tail.rfind(b"\n") + 1]
            file.truncate(start + len(whole))
        lines = whole.splitlines()
        return int(json.loads(lines[-1])["round"]) if lines else 0


def ask_rollback(folder: Path, version: int) -> None:
    """Have the server of that folder go back to a version, at its next round or when it starts."""
    path = folder / "state.safetensors"
    if not path.exists():
        raise DataError(f"{folder}: no deployment has been here")
    known = sorted(load_state(path).deployed)
    if version not in known:
        raise DataError(f"{folder}: version {version} is not kept; there are {known}")
    write_json(folder / "rollback.json", {"version": version})


def read_rollback(folder: Path) -> int | None:
    """The version that somebody has asked to go back to."""
    try:
        return int(json.loads((folder / "rollback.json").read_text(encoding="utf-8"))["version"])
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / 'rollback.json'}: damaged ({error!r}); ask again") from None


def _locked(path: Path) -> int:
    """An open file that nobody else can lock; the system lets go of it when the process ends, however it ends."""
    held = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ConfigError(f"{path.parent}: another server is using this folder") from None
    return held
