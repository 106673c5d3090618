"""What an operator wants to know, read from the server's folder: rounds, participation, reward, privacy, models."""

from pathlib import Path
from typing import Any

from fedbandit.deploy.flower.store import read_rollback
from fedbandit.errors import DataError
from fedbandit.files import read_lines
from fedbandit.simulation.state import load_state

_RECENT = 10  # rounds that "lately" looks at


def read_status(folder: Path) -> dict[str, Any]:
    """The deployment's state as plain values; the server may be running meanwhile."""
    path = folder / "state.safetensors"
    if not path.exists():
        raise DataError(f"{folder}: no deployment has been here; it is the `state` of a deployment's TOML file")
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
    """The same for somebody who reads a terminal."""
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
