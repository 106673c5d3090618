"""The table of attacks in the docs: its script runs, and the stored rows say what the page says."""

import json
import math
from pathlib import Path

import pytest
from scripts import attack_table

ROOT = Path(__file__).parents[3]
STORED = json.loads((ROOT / "scripts" / "results" / "attack_table.json").read_text())


def stored(contexts, rule, attack="none", share=0.0):
    wanted = (contexts, rule, attack, share)
    names = ("contexts", "rule", "attack", "share")
    return next(r for r in STORED["rows"] if tuple(r[n] for n in names) == wanted)


def test_the_script_computes_the_stored_rows():
    """One seed of one row again; a mean of ten lies within four of its standard errors."""
    reward, works = attack_table.run("dense", "trimmed mean 0.1", "backdoor", 0.1, 0)
    row = stored("dense", "trimmed mean 0.1", "backdoor", 0.1)
    assert abs(reward - row["reward"]) < 4 * row["error"] * math.sqrt(STORED["seeds"])
    assert works < 0.5


def test_the_page_says_what_was_found():
    assert STORED["seeds"] >= 10
    for contexts in ("dense", "words"):
        assert stored(contexts, "mean", "backdoor", 0.01)["triggered"] > 0.7
        assert stored(contexts, "trimmed mean 0.1", "backdoor", 0.1)["triggered"] < 0.3
    lost = {
        contexts: 1 - stored(contexts, "trimmed mean 0.1")["reward"] / stored(contexts, "mean")["reward"]
        for contexts in ("dense", "words")
    }  # fmt: skip
    assert lost["dense"] == pytest.approx(0.007, abs=0.0005)
    assert lost["words"] == pytest.approx(0.07, abs=0.005)
    page = (ROOT / "docs" / "deployment.md").read_text()
    for row in STORED["rows"]:
        shown = f"{row['triggered']:.2f}" if row["attack"] == "backdoor" else f"{row['reward']:.3f}"
        assert shown in page
