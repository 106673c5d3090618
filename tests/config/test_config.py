import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbandit.config import Config, parse_settings
from fedbandit.core.errors import ConfigError
from fedbandit.core.parts import flatten

SCALARS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)
KEYS = st.text(min_size=1, max_size=8).filter(lambda key: key not in Config().policy.model_dump())


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_whatever_a_part_is_told_can_be_read_back(parameters):
    config = Config.build(
        {"policy": {"name": "mine:Policy", **parameters}, "data": {"source": "a \U0001f4be/\x7f"}}
    )
    assert Config.build(tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize(
    ("name", "of_its_own"),
    [
        (("policy.name", "falcon"), ("policy.gamma", 7.0)),
        (("server.optimizer", "momentum"), ("server.momentum", 0.5)),
        (("model.name", "mlp"), ("model.hidden", 3)),
    ],
)
def test_the_order_of_settings_does_not_matter(name, of_its_own):
    one, other = (
        Config().with_values(dict(pair)) for pair in ([name, of_its_own], [of_its_own, name])
    )
    assert one == other
    section, _, key = of_its_own[0].partition(".")
    assert getattr(one, section).parameters[key] == of_its_own[1]


def test_a_new_name_takes_the_old_ones_parameters_away():
    config = Config().with_values({"policy.name": "falcon", "policy.gamma": 7.0})
    assert config.with_values({"policy.name": "greedy"}).policy.parameters == {}
    assert config.with_values({"policy.name": "falcon"}).policy.parameters == {"gamma": 7.0}


def test_fixed_replaces_adaptive_and_both_at_once_are_refused():
    adaptive = Config().with_values({"clipping.quantile": 0.5})
    assert adaptive.with_values({"clipping.norm": 1.0}).clipping.quantile is None
    with pytest.raises(ConfigError, match="not both"):
        adaptive.with_values({"clipping.norm": 1.0, "clipping.quantile": 0.6})


def test_settings_are_read_as_toml_and_as_text_where_they_are_none():
    read = parse_settings(["a=1", "b=1.5", "c=true", "d=word", "e=[1, 2]", "f={x=1}", "g=a=b"])
    assert read == {
        "a": 1,
        "b": 1.5,
        "c": True,
        "d": "word",
        "e": [1, 2],
        "f": {"x": 1},
        "g": "a=b",
    }


def test_the_page_of_settings_names_each_with_its_default():
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", page, re.MULTILINE))
    config = Config()
    for key, value in flatten(config.model_dump()).items():
        shown = rows.pop(key)
        if value is not None:
            assert tomllib.loads(f"v = {shown.strip('`')}")["v"] == (
                list(value) if isinstance(value, tuple) else value
            ), key
    assert not rows, f"settings that do not exist: {sorted(rows)}"


def test_changed_copies_share_the_sections_that_stayed_the_same():
    config = Config()
    changed = config.with_values({"policy.beta": 0.25})
    assert changed.client is config.client
    assert changed.policy != config.policy
    assert changed == Config.build(changed.model_dump())
