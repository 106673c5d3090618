"""Statements of `fedbandit advise`, checked by runs on fresh seeds, on six data sets.

    python scripts/check_advice.py scripts/results/check_advice.json --data ../shared/data --work /tmp/check

Each case is an advice: a data set, a scenario and a plan. Every finalist is run again on seeds that
the advice has not seen, at the length of its stage 2; those that a statement is about also at five
times that. A statement "A is better than B" is clearly wrong where the 95% interval of the
difference, paired by seed, lies below zero. One case of each data set is set beside the best of all
contenders at all points of their grids: the six best on one seed, run again on the fresh ones.
Killed, the same command resumes: finished cases are in the results, finished runs in `--work`.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config
from fedbandit.core.files import write_json
from fedbandit.data.importers.arrays import ArrayOptions, import_arrays
from fedbandit.data.importers.contexts import ColumnOptions
from fedbandit.data.importers.items import ItemOptions
from fedbandit.data.importers.stackexchange import import_stackexchange
from fedbandit.data.importers.tables import TableOptions, import_table
from fedbandit.report.advice import recommended, write_advice
from fedbandit.results.differences import markdown_table, paired
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.studies.advice import AdvicePlan, Contest, contenders, judge, run_contest
from fedbandit.studies.compare import folder_name, run_members
from fedbandit.studies.search import points

SHORT = AdvicePlan(rounds=24, deploy_every=3, tries=6, seeds=3)
LONG = AdvicePlan(rounds=40, deploy_every=5, tries=9, seeds=5)
FIXED = (("init", SHORT), ("scratch", LONG), ("init-shift", LONG))
OVER_ITEMS = (("init", SHORT), ("scratch", LONG), ("init", LONG))
CASES = {
    "beer": FIXED, "topics": FIXED, "questions": FIXED, "catalogue": OVER_ITEMS,
    "handwriting": FIXED, "retail": OVER_ITEMS,
}  # fmt: skip
TIMES = 5  # as long as stage 2
FRESH = range(2000, 2004)  # seeds of the reruns
GRID_SEED, GRID_BEST = 3000, 6
HERE = LocalRunner(1)  # one process
LARGE = 0.05  # of the recommended one's reward: a difference that should be stated
NEAR = 0.02


def prepare(name: str, data: Path, out: Path) -> str:
    """The source of a data set: imported below `out`, or an embedded one's name.

    Handwriting has 14 x 14 means of pixels and at most 40 images of a writer, Online Retail the
    last 20 purchases of every third customer.
    """
    if name in ("topics", "catalogue"):
        return name
    if (out / "header.json").exists():
        return str(out)
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    if name == "questions":
        ignored = [f"{column}=ignore" for column in ("question_id", "creation_date", "score")]
        options = TableOptions(
            client="user_id", text=["title"], labels="tags", actions=50, drop_unlabelled=True,
            treat=ignored,
        )  # fmt: skip
        import_table(data / "stackoverflow_questions.csv", out, options)
    elif name == "beer":
        import_stackexchange(data / "stackexchange-beer", out)
    elif name == "handwriting":
        path = out.with_suffix(".npz")
        np.savez(path, **pixels(data / "handwriting62.npz"))
        import_arrays(path, out, ArrayOptions(features="x", labels="y", clients="writers"))
    else:
        import_table(*retail(data / "online_retail.parquet", out))
    return str(out)


def pixels(path: Path, most: int = 40) -> dict[str, np.ndarray]:
    """Images as 196 numbers from 0 to 1, labels and writers."""
    arrays = np.load(path)
    writers = arrays["writers"]
    places = [np.flatnonzero(writers == writer)[:most] for writer in np.unique(writers)]
    rows = np.concatenate(places)
    images = arrays["images"][rows].reshape(len(rows), 14, 2, 14, 2).mean((2, 4)) / 255
    flat = images.reshape(len(rows), -1).astype(np.float32)
    return {"x": flat, "y": arrays["labels"][rows], "writers": writers[rows]}


def retail(path: Path, out: Path) -> tuple[Path, Path, TableOptions]:
    """The purchases in a file of their own, and how docs/your-own-data.md imports them."""
    import pandas as pd

    rows = pd.read_parquet(path)
    bought = rows[rows.CustomerID.notna() & (rows.Quantity > 0)]
    bought = bought[bought.CustomerID.astype(float) % 3 == 0]
    sample = out.with_suffix(".parquet")
    bought.groupby("CustomerID").tail(20).to_parquet(sample, index=False)
    others = ["InvoiceNo", "Quantity", "InvoiceDate", "CustomerID", "Country"]
    items = ItemOptions(
        table=path, column="StockCode", negatives=9, time="InvoiceDate",
        columns=ColumnOptions(treat=[f"{name}=ignore" for name in others]),
    )  # fmt: skip
    own = ["InvoiceNo=ignore", "Description=ignore", "UnitPrice=ignore", "InvoiceDate=date"]
    options = TableOptions(
        client="CustomerID", labels="StockCode", items=items, missing=["0"], treat=own
    )
    return sample, out, options


def check(source: str, scenario: str, plan: AdvicePlan, work: Path, full: bool) -> dict[str, Any]:
    """One case: what the advice says, and what the reruns show."""
    (work / "advice").mkdir(parents=True, exist_ok=True)
    write_json(work / "advice" / "plan.json", asdict(plan))
    held = run_contest(source, 1.0, work / "advice", scenario=scenario, epsilon=None, runner=HERE)
    write_advice(held, work / "advice")
    verdict = judge(held)
    stated = {verdict.recommended, *verdict.better_than}
    again = {1: rerun(held, 1, set(held.configs), work), TIMES: rerun(held, TIMES, stated, work)}
    compared = []
    for one in verdict.found.outcomes:
        if (gap := one.difference) is None:
            continue
        row = {"other": one.configuration, "advised": -gap.mean / abs(verdict_reward(verdict))}
        row |= {"stated": one.configuration in verdict.better_than}
        row |= {"doubt": verdict.doubts.get(one.configuration, "")}
        for times, rewards in again.items():
            ours = rewards[verdict.recommended]
            if found := paired(ours, rewards.get(one.configuration, {})):
                scale = abs(float(np.mean(list(ours.values()))))
                row[f"x{times}"] = [value / scale for value in (found.mean, found.low, found.high)]
        compared.append(row)
    found = {"scenario": scenario, "plan": asdict(plan), "recommended": verdict.recommended}
    found |= {"reward": verdict_reward(verdict), "compared": compared}
    return found | ({"grid": beside_the_grid(held, source, scenario, work)} if full else {})


def verdict_reward(verdict: Any) -> float:
    """The mean reward of the recommended one in stage 2."""
    [reward] = [o.reward for o in verdict.found.outcomes if o.difference is None]
    return float(reward)


def rerun(held: Contest, times: int, names: set[str], work: Path) -> dict[str, Mapping[int, float]]:
    """Some finalists on the fresh seeds, `times` as long, by name; constants earn what they do."""
    rounds = times * held.plan.longer * held.plan.rounds
    members = {
        name: config.with_values({"rounds": rounds, "evaluate_every": rounds})
        for name, config in held.configs.items()
        if name in names
    }
    curves = run_members(
        members, FRESH, lambda name: work / f"x{times}" / folder_name(name), runner=HERE
    )
    constant = {name: dict.fromkeys(FRESH, value) for name, value in held.constants.items()}
    return {**{name: one.by_seed for name, one in curves.items()}, **constant}


def beside_the_grid(held: Contest, source: str, scenario: str, work: Path) -> dict[str, Any]:
    """The recommended configuration's reward beside the best of the full grid's, on fresh seeds."""
    configs, grids, _ = contenders(held.dataset, source, scenario)
    every: dict[str, Config] = {}
    for name, grid in grids.items():
        start = held.plan.second(held.plan.first(configs[name]))
        for point in points(grid):
            every[f"{name} {point}"] = start.with_values(point)

    def place(name: str) -> Path:
        return work / "grid" / folder_name(name)

    once = run_members(every, [GRID_SEED], place, runner=HERE)
    known = [name for name, one in once.items() if len(one.final)]
    best = sorted(known, key=lambda name: -once[name].final[0])[:GRID_BEST]
    own = "recommended"
    members = {name: every[name] for name in best} | {own: recommended(held, judge(held))}
    curves = run_members(members, FRESH, place, runner=HERE)
    means = {name: float(one.final.mean()) for name, one in curves.items() if len(one.final)}
    # A constant is a configuration, too, whose reward in a run has an error; its own is known.
    means[own] = held.constants.get(judge(held).recommended, means[own])
    means |= held.constants
    first = max(means, key=lambda name: means[name])
    return {
        "points": len(every), "best": first, "best_reward": means[first],
        "recommended_reward": means[own], "short_of_it": 1 - means[own] / means[first],
    }  # fmt: skip


def summary(cases: Mapping[str, Any]) -> dict[str, Any]:
    """The three figures asked for, pooled over cases."""
    rows = [row for case in cases.values() for row in case["compared"]]
    stated = [row for row in rows if row["stated"]]
    large = [
        row for row in rows
        if "x1" in row and abs(row["x1"][0]) > LARGE and row["x1"][1] * row["x1"][2] > 0
    ]  # fmt: skip
    found: dict[str, Any] = {"cases": len(cases), "statements": len(stated)}
    for times in (1, TIMES):
        wrong = [row for row in stated if row[f"x{times}"][2] < 0]
        found[f"clearly_wrong_x{times}"] = len(wrong)
    found |= {"large_differences": len(large), "of_them_stated": sum(r["stated"] for r in large)}
    grids = {name: case["grid"] for name, case in cases.items() if "grid" in case}
    near = [name for name, grid in grids.items() if grid["short_of_it"] <= NEAR]
    return {**found, "beside_a_grid": len(grids), "within_2_percent": len(near)}


def table(cases: Mapping[str, Any]) -> str:
    """The cases as a Markdown table."""
    heads = ["case", "rounds", "recommended", "stated", f"wrong at 1x, {TIMES}x"]
    heads += ["above 5%, stated", "below the grid's best"]
    rows = []
    for name, case in cases.items():
        one = summary({name: case})
        plan, grid = case["plan"], case.get("grid")
        rows.append(
            (
                name, str(plan["longer"] * plan["rounds"]), case["recommended"],
                str(one["statements"]),
                f"{one['clearly_wrong_x1']}, {one[f'clearly_wrong_x{TIMES}']}",
                f"{one['large_differences']}, {one['of_them_stated']}",
                f"{100 * grid['short_of_it']:.1f}%" if grid else "",
            )
        )  # fmt: skip
    return "\n".join(markdown_table(heads, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--work", type=Path, default=Path("advice-check"))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    given = parser.parse_args()
    kept = json.loads(given.out.read_text()) if given.out.exists() else {"cases": {}}
    if given.table:
        print(table(kept["cases"]))
        return
    for place in range(3):
        for name in given.only:
            scenario, plan = CASES[name][place]
            label = f"{name}, {scenario}" + ", short" * (plan is SHORT)
            if label in kept["cases"]:
                continue
            source = prepare(name, given.data, given.work / "data" / name)
            work = given.work / label.replace(", ", "-")
            kept["cases"][label] = check(source, scenario, plan, work, full=place == 2)
            shutil.rmtree(work)
            kept = {"cases": kept["cases"], "pooled": summary(kept["cases"])}
            write_json(given.out, kept)
            print(label, kept["pooled"], flush=True)


if __name__ == "__main__":
    main()
