"""Recipes of work: another machine makes the same work, or says what it has otherwise."""

import pytest
from small_runs import small_config

from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import ConfigError
from fedbandit.data import open_dataset


def test_a_file_that_parts_read_is_part_of_the_recipe(tiny_text, tmp_path):
    side = tmp_path / "actions.npy"
    side.write_bytes(b"as it was")
    config = small_config(data__source=str(tiny_text), data__files=[str(side)])
    work = build_experiment(config, open_dataset(str(tiny_text))).bandit.work
    assert work.recipe is not None
    assert work.recipe.make().description == work.description
    side.write_bytes(b"otherwise")
    changed = build_experiment(config, open_dataset(str(tiny_text))).bandit.work
    assert changed.recipe is not None
    assert changed.recipe.digest != work.recipe.digest
    changed.recipe.make()
    with pytest.raises(ConfigError, match=r"actions\.npy: holds other bytes on this machine"):
        work.recipe.make()
