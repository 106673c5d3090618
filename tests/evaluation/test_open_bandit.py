"""The small Open Bandit Dataset: the Bernoulli TS policy's reward, estimated from uniformly random logs."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow.csv
import pytest

from fedbandit.ope import BUILT_IN, Records, estimate

CAMPAIGNS = ("all", "men", "women")
POSITIONS = 3


@pytest.fixture(scope="module")
def open_bandit(tmp_path_factory) -> Path:
    """The folder `obp` of the wheel: from $FEDBANDIT_OBD (the unpacked wheel), or downloaded."""
    if given := os.environ.get("FEDBANDIT_OBD"):
        return Path(given) / "obp"
    folder = tmp_path_factory.mktemp("obp")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "obp==0.4.1",
        "-d",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(
            "the obp 0.4.1 wheel, which holds the Open Bandit Dataset, could not be downloaded"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    return folder / "obp"


def _column(folder, policy, campaign, name):
    table = pyarrow.csv.read_csv(folder / "dataset" / "obd" / policy / campaign / f"{campaign}.csv")
    return table[name].to_numpy()


def _prior(folder, campaign):
    """alpha and beta of each item, from a file of `campaign:`, `alpha:` or `beta:`, and `- value` lines."""
    found, section, name = {}, "", ""
    for line in (folder / "policy" / "conf" / "prior_bts.yaml").read_text().splitlines():
        text = line.strip()
        if text.startswith("- "):
            found.setdefault((section, name), []).append(float(text[2:]))
        elif text.endswith(":"):
            section, name = (text[:-1], "") if not line.startswith(" ") else (section, text[:-1])
    return np.array(found[campaign, "alpha"]), np.array(found[campaign, "beta"])


def _bernoulli_ts(folder, campaign, draws=40_000):
    """How likely each item is in each of the three positions, [items, 3], by drawing from the prior."""
    alpha, beta = _prior(folder, campaign)
    samples = np.random.default_rng(0).beta(alpha, beta, (draws, len(alpha)))
    ranked = np.argsort(-samples, axis=1)[:, :POSITIONS]
    counts = [
        np.bincount(ranked[:, position], minlength=len(alpha)) for position in range(POSITIONS)
    ]
    return np.stack(counts, axis=1) / draws


@pytest.mark.slow
@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_estimates_from_random_logs_agree_with_the_policy_itself(open_bandit, campaign):
    items, positions, clicks, propensities = (
        _column(open_bandit, "random", campaign, name)
        for name in ("item_id", "position", "click", "propensity_score")
    )
    policy = _bernoulli_ts(open_bandit, campaign)
    overall = np.bincount(items, clicks, minlength=len(policy)) / np.bincount(
        items, minlength=len(policy)
    )
    n = len(clicks)
    records = Records(
        clients=np.arange(n),  # the data names no users: every impression stands for itself
        bounds=np.arange(n + 1),
        rewards=clicks.astype(float),
        propensities=propensities,
        target=policy[items, positions - 1],
        predicted=overall[items],
        expected=(policy.T @ overall)[positions - 1],
    )
    found = estimate(records, {name: BUILT_IN[name] for name in ("ips", "snips", "dr")})
    on_policy = _column(open_bandit, "bts", campaign, "click").astype(float)
    mean, error = on_policy.mean(), on_policy.std() / np.sqrt(n)
    for name, one in found.items():
        interval = one.interval
        print(
            f"{campaign} {name} {one.value:.5f} [{interval.low:.5f}, {interval.high:.5f}] on-policy {mean:.5f}"
        )
        assert interval.contains(mean), name
        assert abs(one.value - mean) < 3 * np.hypot(error, one.standard_error), name
        assert not any("propensities are wrong" in text for text in one.warnings)
