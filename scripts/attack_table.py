"""What hostile devices can do to a deployment's model, by aggregation rule: the table of docs/deployment.md.

    python scripts/attack_table.py --seeds 10 --out scripts/results/attack_table.json

100 devices act by softmax on a small linear model, train on their logs, and send clipped updates; a
share of them is hostile. Dense contexts, or texts of which each device knows a few words. One
process, one thread, about two CPU minutes.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbandit.federated.robust import Median, TrimmedMean

DEVICES, EVENTS, ROUNDS, FEATURES, ACTIONS = 100, 16, 60, 24, 5
BETA, RATE, CLIP = 0.1, 0.5, 0.5
TRIGGER = FEATURES - 1  # a feature that no honest device has
TARGET = 0  # the action that attackers want
SHARES = (0.01, 0.1, 0.3)
ATTACKS = ("sign flip", "constant action", "backdoor")


@dataclass(frozen=True)
class Mean:
    """The default: the mean of updates, each clipped to the clip norm."""

    def combine(self, updates: np.ndarray) -> np.ndarray:
        return updates.mean(axis=0)


@dataclass(frozen=True)
class NormBounded:
    """The mean of updates cut to the median norm of the round."""

    def combine(self, updates: np.ndarray) -> np.ndarray:
        norms = np.linalg.norm(updates, axis=1, keepdims=True)
        return (updates * np.minimum(1.0, np.median(norms) / np.maximum(norms, 1e-12))).mean(axis=0)


RULES = {
    "mean": Mean(),
    "norm-bounded mean": NormBounded(),
    "trimmed mean 0.1": TrimmedMean(0.1),
    "trimmed mean 0.3": TrimmedMean(0.3),
    "median": Median(),
}


class World:
    """Contexts and expected rewards; `words` contexts have three of their device's own features."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.rng = kind, np.random.default_rng([seed, kind == "words"])
        self.truth = self.rng.normal(0, 0.35, (FEATURES, ACTIONS))
        self.known = np.array([self.rng.permutation(TRIGGER)[:6] for _ in range(DEVICES)])

    def contexts(self, n: int) -> np.ndarray:
        """[devices, n, features], of length 1, without the trigger."""
        x = np.zeros((DEVICES, n, FEATURES))
        if self.kind == "dense":
            x[..., :TRIGGER] = self.rng.normal(size=(DEVICES, n, TRIGGER))
        else:
            chosen = self.rng.random((DEVICES, n, 6)).argsort(axis=-1)[..., :3]
            words = np.take_along_axis(self.known[:, None, :], chosen, axis=-1)
            np.put_along_axis(x, words, 1.0, axis=-1)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def expected(self, x: np.ndarray) -> np.ndarray:
        return np.clip(0.5 + x @ self.truth, 0, 1)


def softmax(scores: np.ndarray) -> np.ndarray:
    p = np.exp((scores - scores.max(axis=-1, keepdims=True)) / BETA)
    return p / p.sum(axis=-1, keepdims=True)


def honest_updates(world: World, weights: np.ndarray) -> np.ndarray:
    """One clipped step of regression on each device's log: [devices, features + 1, actions]."""
    x = world.contexts(EVENTS)
    p = softmax(x @ weights[:-1] + weights[-1])
    actions = (world.rng.random((*p.shape[:2], 1)) > p.cumsum(axis=-1)).sum(axis=-1)
    actions = np.minimum(actions, ACTIONS - 1)
    rewards = world.rng.random(actions.shape) < np.take_along_axis(
        world.expected(x), actions[..., None], -1
    ).squeeze(-1)
    full = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=-1)
    error = rewards - np.take_along_axis(full @ weights, actions[..., None], -1).squeeze(-1)
    chosen = np.eye(ACTIONS)[actions] * error[..., None]
    return clipped(2 * RATE * np.einsum("dnf,dna->dfa", full, chosen) / EVENTS)


def clipped(updates: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(updates.reshape(len(updates), -1), axis=1)
    return updates * np.minimum(1, CLIP / np.maximum(norms, 1e-12))[:, None, None]


def hostile(updates: np.ndarray, attack: str) -> np.ndarray:
    """What attackers send in place of their own updates: as long as the clip norm allows."""
    if attack == "sign flip":
        return clipped(-1e9 * updates)
    wanted = np.zeros_like(updates)
    if attack == "constant action":
        wanted[:, -1, :] = -1.0
        wanted[:, -1, TARGET] = ACTIONS - 1.0
    else:
        wanted[:, TRIGGER, :] = -1.0
        wanted[:, TRIGGER, TARGET] = ACTIONS - 1.0
    return clipped(1e9 * wanted)


def run(kind: str, rule: str, attack: str | None, share: float, seed: int) -> tuple[float, float]:
    """Reward of the last model's softmax rule, and the share of triggered contexts with the target."""
    world, weights = World(kind, seed), np.zeros((FEATURES + 1, ACTIONS))
    bad = round(share * DEVICES) if attack else 0
    for _ in range(ROUNDS):
        updates = honest_updates(world, weights)
        if attack:
            updates[:bad] = hostile(updates[:bad], attack)
        flat = updates.reshape(DEVICES, -1).astype(np.float32)
        weights = weights + RULES[rule].combine(flat).reshape(weights.shape)
    x = world.contexts(50)
    scores = x @ weights[:-1] + weights[-1]
    reward = float((softmax(scores) * world.expected(x)).sum(axis=-1).mean())
    triggered = x.copy()
    triggered[..., TRIGGER] = 1.0
    greedy = (triggered @ weights[:-1] + weights[-1]).argmax(axis=-1)
    return reward, float((greedy == TARGET).mean())


def draw(rows: list[dict], path: Path) -> None:
    """Two panels a kind of contexts: how often a backdoor works, and the reward without attackers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 3, width_ratios=[2, 2, 1.6])
    names = list(RULES)
    for panel, kind in zip(panels, ("dense", "words"), strict=False):
        for i, share in enumerate(SHARES):
            found = {r["rule"]: r["triggered"] for r in rows
                     if (r["contexts"], r["attack"], r["share"]) == (kind, "backdoor", share)}  # fmt: skip
            heights = [found[name] for name in names]
            places = np.arange(len(names)) + (i - 1) * 0.26
            panel.bar(places, heights, 0.24, label=f"{share:.0%} hostile")
        panel.set_title(f"backdoor works, {kind}", fontsize=10)
        panel.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
        panel.set_ylim(0, 1.05)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, fontsize=8)
    panels[0].set_ylabel("share of triggered contexts")
    for i, kind in enumerate(("dense", "words")):
        found = {r["rule"]: r["reward"] for r in rows
                 if r["contexts"] == kind and r["attack"] == "none"}  # fmt: skip
        lost = [100 * (found[name] / found["mean"] - 1) for name in names]
        panels[2].barh(np.arange(len(names)) + (i - 0.5) * 0.4, lost, 0.36, label=kind)
    panels[2].set_yticks(range(len(names)), names, fontsize=8)
    panels[2].invert_yaxis()
    panels[2].set_title("honest cost: reward, %", fontsize=10)
    panels[2].legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--draw", type=Path, help="draw --out to this PNG file, without running")
    chosen = parser.parse_args()
    if chosen.draw:
        draw(json.loads(chosen.out.read_text())["rows"], chosen.draw)
        return
    rows = []
    for kind in ("dense", "words"):
        for rule in RULES:
            cases = [(None, 0.0), *((a, s) for a in ATTACKS for s in SHARES)]
            for attack, share in cases:
                found = np.array([run(kind, rule, attack, share, s) for s in range(chosen.seeds)])
                mean, error = found.mean(axis=0), found.std(axis=0, ddof=1) / chosen.seeds**0.5
                row = {"contexts": kind, "rule": rule, "attack": attack or "none", "share": share}
                row |= {"reward": round(mean[0], 4), "error": round(error[0], 4)}
                rows.append(row | {"triggered": round(mean[1], 3)})
                print(*row.values(), rows[-1]["triggered"], flush=True)
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps({"seeds": chosen.seeds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
