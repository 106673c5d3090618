"""Model files that no server of ours has written: refused by name before they are in use, whatever they hold."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from device_builders import dense_model, text_model
from safetensors.numpy import save

from fedbandit.core.errors import DataError
from fedbandit.deploy import Agent, DeviceModel


def forged(model=None, /, weights=None, **facts):
    """A file with other facts than a model can have."""
    model = model or text_model()
    names = ("version", "actions", "kind", "shape", "policy", "model", "vocabulary")
    said = {name: getattr(model, name) for name in names}
    text = json.dumps({"format": "fedbandit-model", "format_version": 1, **said, **facts})
    return save(dict(model.weights) if weights is None else weights, metadata={"model": text})


def nested(depth):
    return {} if depth == 0 else {"more": nested(depth - 1)}


WRONG_FACTS = [
    *(
        {"version": value}
        for value in (2**70, 2**53 + 1, -1, 1e308, 2.5, float("nan"), "3", True, None, [1])
    ),
    *(
        {"shape": value}
        for value in (
            [-7],
            [7.0],
            {"0": 7},
            7,
            [],
            [0],
            [True],
            ["7"],
            [7, 1],
            None,
            [2**62],
            [[7]],
        )
    ),
    *({"kind": value} for value in ("ragged", 1, None, [], {})),
    *(
        {"actions": value}
        for value in ("abcd", [1, 2, 3, 4], {}, None, [], ["a", "a", "b", "c"], [["a"]] * 4)
    ),
    *({"vocabulary": value} for value in ("abcdefg", [1] * 7, ["a"], {}, 7)),
    *(
        {"policy": value}
        for value in (None, [], "greedy", {}, {"name": 3}, {"name": []}, {"name": "no-such"})
    ),
    *(
        {"policy": {"name": "softmax", "beta": value}}
        for value in (float("nan"), float("inf"), "x", [], 10**400, -1)
    ),
    {"policy": {"name": "greedy", "more": nested(50)}},
    *(
        {"model": value}
        for value in (None, [], "linear", {}, {"name": 3}, {"name": {}}, {"name": "no-such"})
    ),
    *(
        {"model": {"name": "linear-heads", "heads": value}}
        for value in (0, -1, "x", 1e308, 10**9, 3, None)
    ),
]


@pytest.mark.parametrize("facts", WRONG_FACTS, ids=lambda facts: str(facts)[:60])
def test_facts_that_no_model_has_are_refused(tmp_path, facts):
    with Agent(tmp_path) as agent:
        agent.install(text_model(1))
        with pytest.raises(DataError) as error:
            agent.install(forged(text_model(2), **facts))
        assert "\n" not in str(error.value)
        assert agent.choose("cat").model_version == 1
        assert agent.install(text_model(3))  # and an honest version is no older one


@pytest.mark.parametrize(
    "name", ["version", "actions", "kind", "shape", "policy", "model", "vocabulary"]
)
def test_a_missing_fact_is_named(name):
    text = {"format": "fedbandit-model", "format_version": 1, "vocabulary": None}
    text |= {
        "version": 1,
        "actions": ["a"],
        "kind": "dense",
        "shape": [1],
        "policy": {"name": "greedy"},
    }
    text["model"] = {"name": "linear"}
    del text[name]
    with pytest.raises(DataError, match=f"m: damaged: {name}: missing"):
        DeviceModel.from_bytes(save({}, metadata={"model": json.dumps(text)}), "m")


@pytest.mark.parametrize("text", ["[]", "3", "null", "[" * 100_000, "{"])
def test_metadata_that_are_no_facts(text):
    with pytest.raises(DataError, match="not a fedbandit model"):
        DeviceModel.from_bytes(save({}, metadata={"model": text}))


@pytest.mark.parametrize("model", [text_model(2), dense_model(2)], ids=["text", "dense"])
@pytest.mark.parametrize("value", [3e38, -3e38, 1e31])
def test_finite_weights_whose_scores_would_not_be_are_refused(tmp_path, model, value):
    large = {name: np.full_like(array, value) for name, array in model.weights.items()}
    with Agent(tmp_path) as agent:
        with pytest.raises(DataError, match=r"weight|bias"):
            agent.install(replace(model, weights=large))
        assert agent.model_version is None


@pytest.mark.parametrize("model", [text_model(2), dense_model(2)], ids=["text", "dense"])
def test_the_largest_weights_that_are_accepted_act(tmp_path, model):
    signs = np.random.default_rng(0).choice([-1, 1], model.weights["weight"].shape)
    large = {
        "weight": np.float32(9e29) * signs.astype(np.float32),
        "bias": np.full(4, 9e29, np.float32),
    }
    with Agent(tmp_path) as agent:
        agent.install(replace(model, weights=large))
        for _ in range(5):
            assert agent.choose("cat mat" if model.kind == "sparse" else np.full(6, 1e3)).logged


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float16, bool])
def test_weights_that_are_no_float32_or_float64_are_refused(dtype):
    weights = {"weight": np.zeros((7, 4), dtype), "bias": np.zeros(4, dtype)}
    with pytest.raises(DataError, match="where float32 or float64"):
        DeviceModel.from_bytes(forged(weights=weights))


def test_an_enormous_layer_is_refused_before_it_is_made(tmp_path):
    """In a process with little memory: an mlp that would need 14 gigabytes is refused, not tried."""
    pytest.importorskip("torch")
    payload = forged(dense_model(2), model={"name": "mlp", "hidden": 300_000_000})
    (tmp_path / "model").write_bytes(payload)
    code = """
import sys, resource
from pathlib import Path
import torch
from fedbandit.core.errors import DataError
from fedbandit.deploy import Agent
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
try:
    Agent(sys.argv[1] + "/agent").install(Path(sys.argv[1]) / "model")
except DataError as error:
    print(error)
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("measures memory as Linux does")
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "model 2: the weights do not fit mlp"), (
        done.stderr
    )


def test_a_network_whose_layers_multiply_beyond_all_numbers_is_refused(tmp_path):
    pytest.importorskip("torch")
    model = dense_model(2)
    shapes = {"dense1": (6, 3), "dense1_bias": (3,), "dense2": (3, 4), "dense2_bias": (4,)}
    weights = {name: np.full(shape, 1e20, np.float32) for name, shape in shapes.items()}
    with Agent(tmp_path) as agent, pytest.raises(DataError, match="too large"):
        agent.install(replace(model, weights=weights, model={"name": "mlp", "hidden": 3}))


class Broken:
    """A rule whose probabilities are none."""

    def probabilities(self, prediction, available=None):
        return np.full(prediction.mean.shape, 0.7)


def test_a_rule_that_would_break_every_choice_is_refused(tmp_path):
    name = f"{__name__}:Broken"
    with Agent(tmp_path, trusted=[name]) as agent:
        with pytest.raises(
            DataError, match=r"model 1: cannot act: .*Broken gave probabilities that sum to"
        ):
            agent.install(text_model(policy={"name": name}))
        assert agent.model_version is None


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_model_is_replaced_by_the_one_before_until_it_comes_again(tmp_path, caplog):
    with Agent(tmp_path) as agent:
        for version in (1, 2, 3):
            agent.install(text_model(version, seed=version))
    flip(tmp_path / "models" / "model-3.safetensors")
    flip(
        tmp_path / "models" / "model-2.safetensors"
    )  # its digest is known, so it is not taken for a sound one
    with Agent(tmp_path) as agent, caplog.at_level(logging.WARNING, "fedbandit.deploy"):
        assert {agent.choose("cat").model_version for _ in range(3)} == {1}
        assert agent.model_version == 1
        said = [record.message for record in caplog.records if "damaged" in record.message]
        assert len(said) == 1
        assert said[0].startswith("acting with model 1:")
        assert "model-3.safetensors: damaged" in said[0]
        assert agent.install(text_model(3, seed=3))
        assert agent.choose("cat").model_version == 3


def test_without_an_earlier_model_the_damage_is_said(tmp_path):
    with Agent(tmp_path) as agent:
        agent.install(text_model())
    flip(tmp_path / "models" / "model-1.safetensors")
    with Agent(tmp_path) as agent, pytest.raises(DataError, match=r"model-1\.safetensors: damaged"):
        agent.choose("cat")


@pytest.mark.parametrize(
    "pointer",
    ["[]", "3", "null", "{", "[" * 100_000, '{"version": 1e999, "sha256": "x"}', '{"version": 1.5, "sha256": "x"}',
     '{"version": -1, "sha256": "x"}', '{"version": 1}', '{"version": 1, "sha256": 5}',
     '{"version": 1, "sha256": "x", "digests": []}'],
)  # fmt: skip
def test_a_damaged_pointer_is_named_and_mended_by_an_installation(tmp_path, pointer):
    with Agent(tmp_path) as agent:
        agent.install(text_model())
    (tmp_path / "models" / "current.json").write_text(pointer)
    with Agent(tmp_path) as agent:
        with pytest.raises(DataError, match=r"current\.json: damaged") as error:
            agent.choose("cat")
        assert "\n" not in str(error.value)
        assert agent.install(text_model())
        assert agent.choose("cat").logged


FACTORISED = """
import numpy as np
import torch

from fedbandit.models import DataSpec, Model


def factorised(data: DataSpec, rank: int = 4) -> Model:
    (words,) = data.shape

    def init(seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {"words": rng.normal(0, 0.1, (words, rank)), "actions": rng.normal(0, 0.1, (rank, data.num_actions))}

    def scores(params, x):
        ids, offsets = torch.as_tensor(x.ids).long(), torch.as_tensor(x.offsets).long()
        values = torch.as_tensor(x.values).to(params["words"])
        hidden = torch.nn.functional.embedding_bag(
            ids, params["words"], offsets, mode="sum", per_sample_weights=values, include_last_offset=True
        )
        return hidden @ params["actions"]

    return Model(init, scores)
"""


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_users_text_model_acts_on_a_device(tmp_path, monkeypatch, dtype):
    """The model of the documentation, from its own file."""
    pytest.importorskip("torch")
    (tmp_path / "factorised_model.py").write_text(FACTORISED)
    monkeypatch.syspath_prepend(str(tmp_path))
    name, rng = "factorised_model:factorised", np.random.default_rng(0)
    weights = {
        "words": rng.normal(size=(7, 2)).astype(dtype),
        "actions": rng.normal(size=(2, 4)).astype(dtype),
    }
    model = replace(text_model(), weights=weights, model={"name": name, "rank": 2})
    with Agent(tmp_path / "agent", trusted=[name]) as agent:
        agent.install(model)
        assert agent.choose("cat mat").logged
        assert agent.choose("").logged
        used = agent._used()
        (scores,) = used.actor.predict(used.encode("cat mat")).mean
    words = (weights["words"][1] + weights["words"][5]) * 2**-0.5
    np.testing.assert_allclose(scores, words @ weights["actions"], rtol=1e-5)


def test_a_network_in_float64_acts_on_a_device(tmp_path):
    pytest.importorskip("torch")
    shapes = {"dense1": (6, 3), "dense1_bias": (3,), "dense2": (3, 4), "dense2_bias": (4,)}
    weights = {name: np.ones(shape) for name, shape in shapes.items()}
    with Agent(tmp_path) as agent:
        agent.install(replace(dense_model(), weights=weights, model={"name": "mlp", "hidden": 3}))
        assert agent.choose(np.ones(6)).logged
