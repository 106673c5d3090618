"""Presets on data with few clients: the message names values that work."""

import re

import pytest
from builders import random_text

from fedbandit import preset
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import ConfigError

PRESETS = (
    "so-scratch-softmax",
    "so-init-softmax",
    "so-init-shift-falcon",
    "so-init-baseline",
    "so-dp-0.3",
)


@pytest.mark.parametrize("clients", [4, 55, 149])
@pytest.mark.parametrize("name", PRESETS)
def test_the_message_names_values_that_work(name, clients):
    data, config = random_text(clients=clients), preset(name)
    if (
        clients >= 64 and "init" not in name
    ):  # the presets take 64 clients a round, and 100 for pre-training
        build_experiment(config, data)
        return
    with pytest.raises(ConfigError) as caught:
        build_experiment(config, data)
    values = dict(re.findall(r"--set (\S+)=(\d+)", str(caught.value)))
    assert values, str(caught.value)
    build_experiment(config.with_values({key: int(value) for key, value in values.items()}), data)
