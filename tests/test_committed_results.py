"""Committed results of scripts/results keep to what docs/privacy.md and docs/reliability.md promise."""

import json
import math
from pathlib import Path

import pytest
from audit_violations import VIOLATIONS

FOLDER = Path(__file__).parents[1] / "scripts" / "results"


def read(name):
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def test_no_attack_does_better_than_chance():
    found = read("privacy_attacks.json")
    assert {row["mechanism"] for row in found["figures"]} == {
        "dp-fedavg", "dp-ftrl", "banded-mf", "blt",
    }  # fmt: skip
    for row in found["figures"]:
        chance = row["guessed_by_chance"]
        assert row["rounds"] == 10_000
        assert row["recovered"] <= chance + 3 * math.sqrt(chance)
        assert row["coordinator_recovered"] == 0
    assert [row["noise_multiplier"] for row in found["weights"]] == [1, 2, 4]
    for row, before in zip(found["weights"], (0.43, 0.29, 0.19), strict=True):
        assert row["without"] < min(row["most_without"], before)
    planted = found["planted_client"]
    assert sorted(row["seed"] for row in planted) == list(range(20))
    assert all(row["proved"] <= row["stated"] for row in planted)


def test_noise_from_the_devices_earns_what_the_servers_does():
    """Within 5%, where noise is cheap and where it costs 10 to 30% of the reward."""
    found = read("device_noise_rewards.json")
    assert found["clients_per_round"] == 2560
    cheap, dear = found["at"]
    assert cheap["system_of_none"] > 0.95
    assert 0.7 <= dear["system_of_none"] <= 0.9
    for row in (cheap, dear):
        assert abs(row["devices_of_system"] - 1) <= 0.05
        server = row["towards_server"]
        assert (server["dropout"], server["colluders"]) == (0.2, 0.1)
        assert server["epsilon_rdp"] <= row["epsilon"]


@pytest.mark.parametrize("kind", ["no noise of devices", "devices' noise"])
def test_a_secure_sum_costs_its_server_no_more_than_was_allowed(kind):
    """1.5 times the 9.7 s of the protocol that did not hold against a server that acts."""
    cost = read("secure_sum_cost.json")[kind]
    assert (cost["devices"], cost["in_the_sum"], cost["weights"]) == (1000, 900, 500_000)
    assert cost["right"]
    assert 0 < cost["server_seconds"] <= 1.5 * 9.7
    assert 0 < cost["device_seconds"] < 1
    assert (cost["of_it_noise_seconds"] > 0) == (kind == "devices' noise")


def test_the_audit_catches_every_violation_and_blames_no_right_rounds():
    counts = read("audit_counts.json")
    for name, one in VIOLATIONS.items():
        for target in one.targets:
            kept = counts[f"{name} ({target})"]
            assert kept["audits"] == 40
            assert kept["violated"] >= 0.95 * 40, (name, target)
    full, reduced = (counts[f"right rounds, {size} audit"] for size in ("full", "reduced"))
    assert (full["audits"], full["violated"]) == (40, 0)
    assert reduced["audits"] == 1000
    assert reduced["violated"] <= 4  # at a level of 0.001: five or more in 0.4%


def test_killed_studies_end_with_the_same_bytes():
    histories = read("kills.json")["histories"]
    assert {one["study"] for one in histories} == {"advise", "bakeoff", "figure", "sweep"}
    assert sum(sum(one["kills"].values()) for one in histories) >= 150
    assert not any(one["differ"] for one in histories)


def test_killed_deployments_count_every_event_once():
    histories = read("deployment_kills.json")["histories"]
    assert sum(sum(one["kills"].values()) for one in histories) >= 50
    for one in histories:
        assert len(one["claims"]) == 7
        assert all(one["claims"].values()), one["seed"]
        assert one["rewards"] == one["counted"] > 0


def test_the_attack_table_is_whole_and_says_what_a_backdoor_does():
    """One device in a hundred owns most triggered contexts under the mean, ten none when trimmed."""
    table = read("attack_table.json")
    assert table["seeds"] >= 10
    rows = {
        (row["contexts"], row["rule"], row["attack"], row["share"]): row for row in table["rows"]
    }
    rules = ("mean", "norm-bounded mean", "trimmed mean 0.1", "trimmed mean 0.3", "median")
    for contexts in ("dense", "words"):
        for rule in rules:
            honest = rows[contexts, rule, "none", 0.0]["reward"]
            for attack in ("sign flip", "constant action", "backdoor"):
                for share in (0.01, 0.1, 0.3):
                    assert rows[contexts, rule, attack, share]["reward"] < honest + 0.02
        untouched = rows[contexts, "trimmed mean 0.1", "none", 0.0]["triggered"]
        assert rows[contexts, "mean", "backdoor", 0.01]["triggered"] > 0.7
        assert rows[contexts, "trimmed mean 0.1", "backdoor", 0.1]["triggered"] < untouched + 0.05


def test_intervals_of_off_policy_evaluation_cover_on_every_kind_of_log():
    """What was refused is not counted; obp's stand beside them, from as many draws."""
    kinds = json.loads((FOLDER.parents[1] / "benchmarks" / "coverage.json").read_text())
    assert len(kinds) == 45
    for name, found in kinds.items():
        for one in (found[estimator] for estimator in ("ips", "snips", "dr", "switch")):
            assert one["refused"] == 1 or one["coverage"] >= 0.93, name
        assert found["obp"] or name.startswith("copies"), name


def test_few_statements_of_advice_are_wrong():
    """Of the cases that have been run: at either length at most one in ten."""
    pooled = read("check_advice.json")["pooled"]
    assert pooled["statements"] > 0
    assert max(pooled["clearly_wrong_x1"], pooled["clearly_wrong_x5"]) <= pooled["statements"] / 10
    assert pooled["of_them_stated"] >= pooled["large_differences"] / 2
