"""The server's folder: state, models, metrics, requests of the operator, and what `deploy status` reads from it."""

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.files import read_lines, write_bytes, write_json
from fedbandit.deploy.server.deployment import Deployment
from fedbandit.federated.state import State, load_state, save_state

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
        memory = {int(k.removeprefix(_NOISE)): v for k, v in state.kept.items() if k.startswith(_NOISE)}
        kept = {k: v for k, v in state.kept.items() if not k.startswith(_NOISE)}
        return replace(state, kept=kept), memory

    def checkpoint(self, state: State, memory: dict[int, np.ndarray]) -> None:
        """From here on the round has happened."""
        noise = {f"{_NOISE}{number}": value for number, value in memory.items()}
        save_state(replace(state, kept={**state.kept, **noise}), self.folder / "state.safetensors")

    def publish(self, state: State, deployment: Deployment) -> None:
        """Bring models and metrics up to the checkpoint; does nothing where they are."""
        for version, deployed in state.deployed.items():
            path = self.model_path(version)
            if not path.exists():
                write_bytes(path, deployment.device_model(deployed, version).to_bytes())
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
        raise DataError(f"{folder}: not the state folder of a deployment")
    known = sorted(load_state(path).deployed)
    if version not in known:
        raise DataError(f"{folder}: version {version} is not kept; there are {known}")
    write_json(folder / "rollback.json", {"version": version})


def read_rollback(folder: Path) -> int | None:
    """The version that a rollback was requested to."""
    try:
        return int(json.loads((folder / "rollback.json").read_text(encoding="utf-8"))["version"])
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / 'rollback.json'}: damaged ({error!r}); ask for the rollback again") from None


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
    path = folder / "state.safetensors"
    if not path.exists():
        raise DataError(f"{folder}: not the state folder of a deployment (`state` in its TOML file)")
    state = load_state(path)
    lines = _metrics(folder)
    recent = lines[-_RECENT:]
    asked = sum(line["asked"] for line in recent)
    last = lines[-1] if lines else {}
    epsilons = [line["epsilon_pld"] for line in lines if line.get("epsilon_pld") is not None]
    refused: dict[str, int] = {}
    for line in lines:
        for kind, count in line["refused"].items():
            refused[kind] = refused.get(kind, 0) + count
    return {
        "round": state.round,
        "devices": len(state.extra.get("last_turn", {})),
        "participation": {
            "rounds": len(recent),
            "asked": asked,
            "reported": sum(line["clients"] for line in recent),
            "idle": sum(line["idle"] for line in recent),
            "refused": sum(sum(line["refused"].values()) for line in recent),
        },
        "refused": dict(sorted(refused.items())),
        "reward": {
            "running": state.running_reward,
            "lately": _mean_reward(recent),
            "by_version": _by_version(lines),
        },
        "privacy": {"epsilon_rdp": last.get("epsilon"), "epsilon_pld": max(epsilons, default=None)}
        if "epsilon" in last
        else None,
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
    lines = [
        f"round          {status['round']}",
        f"devices seen   {status['devices']}",
        f"participation  {part['reported']} reports of {part['asked']} asked in the last {part['rounds']} rounds;"
        f" {part['idle']} had nothing to train on, {part['refused']} were refused",
        f"reward         {_shown(reward['running'])} over all rounds, {_shown(reward['lately'])} lately",
        f"privacy        {_privacy(status['privacy'])}",
        "aggregation    "
        + ("secure: only sums are seen here" if status["secure_aggregation"] else "plain: each report is seen here"),
        f"clip norm      {status['clip_norm']:.4g}",
        f"model          version {status['model_version']}; kept: {', '.join(map(str, status['kept_versions']))}",
    ]
    if status["gate"] is not None:
        lines.append(f"gate           {_judged(status['gate'])}")
    for entry in status["versions"][-_RECENT:]:
        earned = _shown(reward["by_version"].get(entry["version"]))
        lines.append(f"  version {entry['version']:<4} after round {entry['round']:<5} reward {earned}  {entry['why']}")
    if status["refused"]:
        lines.append("refused        " + ", ".join(f"{kind} {count}" for kind, count in status["refused"].items()))
    if status["rollback_asked"] is not None:
        lines.append(f"asked for      going back to model {status['rollback_asked']}, at the next round")
    return lines


def _metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return read_lines(path) if path.exists() else []


def _mean_reward(lines: list[dict[str, Any]]) -> float | None:
    events = sum(line["events"] for line in lines)
    return sum((line["reward"] or 0.0) * line["events"] for line in lines) / events if events else None


def _by_version(lines: list[dict[str, Any]]) -> dict[int, float | None]:
    """The reward of the events that were reported while a version was in use."""
    versions = dict.fromkeys(line["model_version"] for line in lines)
    return {version: _mean_reward([line for line in lines if line["model_version"] == version]) for version in versions}


def _gate(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The last verdict on a model, with its round, and how many there were; None where nothing was judged."""
    judged = [line for line in lines if "gate" in line]
    if not judged:
        return None
    held_back = sum(not line["gate"]["passes"] for line in judged)
    return {"round": judged[-1]["round"], **judged[-1]["gate"], "judged": len(judged), "held_back": held_back}


def _judged(gate: dict[str, Any]) -> str:
    done = "let the model pass" if gate["passes"] else "held the model back"
    return (
        f"{done} after round {gate['round']}: gain {_shown(gate['gain'])}, at least {_shown(gate['lower'])},"
        f" by {gate['devices']} devices; {gate['held_back']} of {gate['judged']} held back so far"
    )


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _privacy(spent: dict[str, Any] | None) -> str:
    if spent is None:
        return "no differential privacy"
    tight = "" if spent["epsilon_pld"] is None else f", {_shown(spent['epsilon_pld'])} (PLD) at the last deployment"
    return f"epsilon {_shown(spent['epsilon_rdp'])} (RDP){tight}"
