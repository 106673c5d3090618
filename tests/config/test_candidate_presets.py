"""Presets over candidates: one for every rule that works there, and each of them runs."""

import pytest

from fedbandit import policies, preset, simulate
from fedbandit.presets import all_presets

FIXED = {"constant"}  # an action by its number
RULES = sorted(set(policies.BUILT_IN) - FIXED)


@pytest.mark.parametrize("data", ["gallery", "catalogue"])
def test_every_rule_has_a_preset(data):
    named = {name.removeprefix(f"{data}-") for name in all_presets() if name.startswith(f"{data}-")}
    assert named == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_presets_over_candidates_run(rule):
    small = {"rounds": 2, "deploy_every": 1, "clients_per_round": 4}
    config = preset(f"gallery-{rule}").with_values(small)
    assert len(list(simulate(config))) == 2
