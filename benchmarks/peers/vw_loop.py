"""Learning per event beside Vowpal Wabbit: the same events, in the same order, learned from one round later.

    $ python -m benchmarks.peers.vw_loop questions stream --data so-questions
    $ python -m benchmarks.peers.vw_loop questions ours --data so-questions
    $ vw-venv/bin/python benchmarks/peers/vw_loop.py questions vw
    $ python -m benchmarks.peers.vw_loop questions table

In place of `questions`: `catalogue` (`fedbandit data generate catalogue --clients 6000 -o DATA`) and
`shop` (Online Retail, as docs/your-own-data.md imports it), whose decisions have candidates with
features. `stream` writes the events of a run's rounds, `vw` (in an environment with `vowpalwabbit`
and numpy) acts on a round's events with `--cb_explore_adf` and learns from them before the next
one, `ours` runs the federated algorithms, deploying every round. Everybody tries 24 settings, and
some beyond their edges, on the seed TUNING; the best one is run on SEEDS. All numbers go into
`benchmarks/learning_per_event.json`, where a run is found again and not repeated.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

KEPT = Path(__file__).parents[1] / "learning_per_event.json"
TUNING, SEEDS = (10,), (0, 1, 2, 3, 4)
# A preset and its changes: about 16,000 events of questions, 100,000 with candidates.
WORLDS: dict[str, tuple[str, dict[str, int]]] = {
    "questions": ("so-scratch-softmax", {"rounds": 33}),
    "catalogue": ("catalogue-softmax", {"rounds": 64}),
    "shop": ("catalogue-softmax", {"rounds": 64, "client.max_examples": 32}),
}

_EXPLORE = (
    *(f"--squarecb --gamma_scale {scale}" for scale in (30, 100, 300, 1000)),
    *(f"--epsilon {epsilon}" for epsilon in (0.02, 0.05)),
    *(f"--softmax --lambda {sharpness}" for sharpness in (10, 20)),
)
VW = [f"{rule} -l {rate}" for rule, rate in product(_EXPLORE, (0.5, 1.5, 4.0))]
# Beyond the edges of its 24 settings that the best one of questions lies on, for each contender.
VW_BEYOND = [
    f"--squarecb --gamma_scale {g} -l {r}" for g, r in product((3, 10, 30), (4.0, 8.0, 16.0))
]


def _settings(world: str, name: str) -> list[dict[str, Any]]:
    """24 settings of one of our algorithms and some beyond, as changes of the world's preset."""
    fixed = {} if name == "fedavg" else {"algorithm.name": "diag-newton"}
    beyond: list[tuple[float, ...]] = []
    if name == "fedavg":
        client = (0.05, 0.5) if world == "questions" else (0.2, 1.0)
        names = ("server.learning_rate", "client.learning_rate", "policy.beta")
        grid = [*product((0.02, 0.05, 0.1, 0.2), client, (0.02, 0.05, 0.1))]
        lower = (0.005, 0.01, 0.02) if world == "questions" else (0.02, 0.05, 0.1)
        beyond = [*product(lower, (0.4 * client[0], client[0]), (0.01, 0.02))]
    elif world != "questions":  # candidates share their weights, which many events reach
        rates, priors = (0.3, 1.0), (0.2, 1.0, 5.0, 20.0)
        names = ("algorithm.rate", "algorithm.prior", "policy.beta")
        grid = [*product(rates, priors, (0.02, 0.05, 0.1))]
        beyond = [*product((1.0, 2.0), (0.5, 1.0), (0.005, 0.01))]
        if name != "diag-newton":
            names = (*names, "policy.alpha")
            grid = [*product(rates, priors[1:], (0.02, 0.05), (0.1, 0.4))]
            beyond = [(*values, 0.1) for values in beyond]
    elif name == "diag-newton":
        names = ("algorithm.rate", "algorithm.prior", "policy.beta")
        grid = [*product((0.3, 0.5, 0.7), (0.1, 0.2), (0.02, 0.035, 0.05, 0.1))]
        beyond = [*product((0.3, 0.5), (0.4, 0.8), (0.02, 0.035))]
    else:
        names = ("algorithm.rate", "policy.alpha", "policy.beta")
        grid = [*product((0.3, 0.5, 0.7), (0.05, 0.1, 0.2, 0.4), (0.02, 0.05))]
        beyond = [*product((0.2, 0.3), (0.4, 0.8), (0.01, 0.02))]
    each = dict.fromkeys([*grid, *beyond])
    return [fixed | dict(zip(names, values, strict=True)) for values in each]


OURS = ("fedavg", "diag-newton", "diag-newton with width")


def write_streams(world: str, data: str, to: Path) -> None:
    """One file a seed: the features of every event, its right actions, and where rounds begin."""
    from fedbandit import open_dataset, preset
    from fedbandit.assembly.experiment import build_experiment

    to.mkdir(parents=True, exist_ok=True)
    dataset, (start, changes) = open_dataset(data), WORLDS[world]
    for seed in (*TUNING, *SEEDS):
        config = preset(start).with_values({"seed": seed, **changes})
        phase = build_experiment(config, dataset).bandit
        parts: dict[str, list[np.ndarray]] = {}
        rounds = [0]
        for number in range(1, config.rounds + 1):
            cohort = phase.cohorts.draw(number)
            visits = phase.work.plan.visits(phase.work.split, cohort, number)
            contexts = phase.work.split.contexts(visits.rows)
            labels = phase.work.split.labels.take(visits.rows)
            found = {**_rows("shared", contexts.shared), **_rows("right", labels)}
            if contexts.candidates is not None:
                found |= _rows("item", contexts.candidates.features)
                found["shown"] = contexts.candidates.counts
            for key, array in found.items():
                parts.setdefault(key, []).append(np.asarray(array))
            rounds.append(rounds[-1] + len(visits.rows))
        joined = {key: np.concatenate(arrays) for key, arrays in parts.items()}
        actions = dataset.header.num_actions or 0
        np.savez(to / f"{world}-{seed}.npz", rounds=np.array(rounds), actions=actions, **joined)


def _rows(name: str, rows: Any) -> dict[str, np.ndarray]:
    """Ids, values and lengths of sparse rows, or the non-zero entries of dense ones."""
    if isinstance(rows, np.ndarray):
        flat = rows.reshape(len(rows), -1)
        where, ids = np.nonzero(flat)
        counts = np.bincount(where, minlength=len(flat))
        return {name: ids, f"{name} values": flat[where, ids], f"{name} lengths": counts}
    found = {name: rows.ids, f"{name} lengths": np.diff(rows.offsets)}
    return found | ({} if rows.values is None else {f"{name} values": rows.values})


def _said(stream: Any, name: str, namespace: str) -> list[str]:
    """One namespace of Vowpal Wabbit's text for every row."""
    cuts = np.cumsum(stream[f"{name} lengths"])[:-1]
    pairs = zip(np.split(stream[name], cuts), np.split(stream[f"{name} values"], cuts), strict=True)
    texts = (" ".join(f"{i}:{v:.6g}" for i, v in zip(*pair, strict=True)) for pair in pairs)
    return [f"|{namespace} {text}" for text in texts]


def _events(stream: Any) -> Iterator[tuple[str, list[str], set[int]]]:
    """The shared line of every event, a line for each action, and its right actions."""
    right = np.split(stream["right"], np.cumsum(stream["right lengths"])[:-1])
    shared = _said(stream, "shared", "w")
    fixed = [f"|a {a}" for a in range(int(stream["actions"]))]
    items = _said(stream, "item", "a") if "item" in stream else fixed
    ends = np.cumsum(stream["shown"]) if "shown" in stream else None
    for i, good in enumerate(right):
        lines = fixed if ends is None else items[ends[i] - stream["shown"][i] : ends[i]]
        yield f"shared {shared[i]}", lines, set(good.tolist())


def vw_reward(stream: Any, settings: str, seed: int) -> tuple[float, float]:
    """Mean reward of the rounds' means, and events a CPU second, of one Vowpal Wabbit."""
    import vowpalwabbit

    rng = np.random.default_rng(seed)
    events, rounds = list(_events(stream)), stream["rounds"]
    begin = time.process_time()
    vw = vowpalwabbit.Workspace(
        f"--cb_explore_adf {settings} -q wa --ignore_linear w -b 20 --quiet --random_seed {seed}"
    )
    earned = []
    for first, last in pairwise(rounds):
        logged, rewards = [], []
        for shared, lines, good in events[first:last]:
            chances = np.array(vw.predict([shared, *lines]))
            action = int(rng.choice(len(lines), p=chances / chances.sum()))
            reward = float(action in good)
            rewards.append(reward)
            label = f"0:{-reward}:{chances[action]:.8g} {lines[action]}"
            logged.append([shared, *lines[:action], label, *lines[action + 1 :]])
        for example in logged:
            vw.learn(example)
        earned.append(float(np.mean(rewards)))
    vw.finish()
    return float(np.mean(earned)), len(events) / (time.process_time() - begin)


def our_reward(
    world: str, dataset: Any, settings: Mapping[str, Any], seed: int
) -> tuple[float, float]:
    """The same of one of our runs, on one thread."""
    from fedbandit import preset, simulate

    start, changes = WORLDS[world]
    fixed = {**changes, "deploy_every": 1, "evaluate_every": 10**6, "threads": 1}
    config = preset(start).with_values({**settings, **fixed, "seed": seed})
    begin = time.process_time()
    lines = list(simulate(config, dataset))
    events = sum(line["events"] for line in lines)
    return float(lines[-1]["running_reward"]), events / (time.process_time() - begin)


def tuned(
    world: str, name: str, grid: list[Any], run: Callable[[Any, int], tuple[float, float]]
) -> None:
    """Try every setting on the tuning seeds, then the best one on the others; kept as it comes."""
    results = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    mine = results.setdefault(world, {}).setdefault(name, {"tuning": {}})

    def kept(group: dict[str, Any], settings: Any, seeds: tuple[int, ...]) -> list[list[float]]:
        key = _key(settings)
        if len(group.get(key, ())) < len(seeds):
            group[key] = [[round(x, 5) for x in run(settings, seed)] for seed in seeds]
            KEPT.write_text(json.dumps(results, indent=1) + "\n")
            print(name, key, group[key], flush=True)
        group[key] = group[key][: len(seeds)]
        found: list[list[float]] = group[key]
        return found

    means = [mean(r for r, _ in kept(mine["tuning"], s, TUNING)) for s in grid]
    best = grid[int(np.argmax(means))]
    mine["best"], mine["seeds"] = best, {_key(best): mine.get("seeds", {}).get(_key(best), [])}
    kept(mine["seeds"], best, SEEDS)
    KEPT.write_text(json.dumps(results, indent=1) + "\n")


def _key(settings: Any) -> str:
    return settings if isinstance(settings, str) else json.dumps(settings)


def best_runs(found: Mapping[str, Any]) -> list[list[float]]:
    """Reward and events a CPU second of the best setting, for each of SEEDS."""
    runs: list[list[float]] = found["seeds"][_key(found["best"])]
    return runs


def table(world: str) -> str:
    """Reward of everybody with its standard error, the paired difference from VW, events a second."""
    results = json.loads(KEPT.read_text())[world]
    rows = {name: best_runs(found) for name, found in results.items() if "best" in found}
    out = ["| | reward | beside VW, paired | events a CPU second |", "| --- | --- | --- | --- |"]
    base = [r for r, _ in rows["vw"]]
    for name, runs in rows.items():
        rewards = [r for r, _ in runs]
        beside = (
            "" if name == "vw" else _spread([a - b for a, b in zip(rewards, base, strict=True)])
        )
        speed = mean(speed for _, speed in runs)
        out.append(f"| {name} | {_spread(rewards)} | {beside} | {speed:,.0f} |")
    return "\n".join(out)


def _spread(values: list[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values) / len(values) ** 0.5:.3f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("world", choices=list(WORLDS))
    parser.add_argument("what", choices=["stream", "ours", "vw", "table"])
    parser.add_argument("--data", default="so-questions", help="the folder of the data set")
    parser.add_argument("--streams", "-o", type=Path, default=Path("streams"))
    asked = parser.parse_args()
    if asked.what == "stream":
        write_streams(asked.world, asked.data, asked.streams)
    elif asked.what == "vw":
        files = {s: asked.streams / f"{asked.world}-{s}.npz" for s in (*TUNING, *SEEDS)}
        tuned(
            asked.world,
            "vw",
            [*VW, *VW_BEYOND],
            lambda s, seed: vw_reward(dict(np.load(files[seed])), s, seed),
        )
    elif asked.what == "ours":
        from fedbandit import open_dataset

        opened = open_dataset(asked.data)
        for contender in OURS:
            run = partial(our_reward, asked.world, opened)
            tuned(asked.world, contender, _settings(asked.world, contender), run)
    else:
        print(table(asked.world))
