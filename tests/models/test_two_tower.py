"""The two-tower model: ten lines of numpy, the same from torch, and it learns tastes over candidates."""

import numpy as np
import pytest

from fedbandit import open_dataset, simulate
from fedbandit.acting import make_predictor
from fedbandit.acting.predictors import TorchPredictor
from fedbandit.config import Config
from fedbandit.core.contexts import Candidates, Contexts, ItemSpec
from fedbandit.core.errors import ConfigError
from fedbandit.data.embedded import gallery
from fedbandit.models import DataSpec, Layout, build_model

SPEC = DataSpec("dense", (3,), 0, ItemSpec("dense", (4,), 4.0, 6))


def decisions(counts):
    rng, bounds = np.random.default_rng(0), np.cumsum([0, *counts])
    features = rng.normal(size=(bounds[-1], 4)).astype(np.float32)
    shown = Candidates(bounds, np.arange(bounds[-1]), features)
    return Contexts(rng.normal(size=(len(counts), 3)).astype(np.float32), shown)


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_scores_are_those_of_ten_lines_in_numpy_and_torch():
    model, contexts = build_model("two-tower", SPEC, {"size": 5}), decisions([3, 1, 4])
    layout = Layout.of(model.init(0))
    weights = np.random.default_rng(1).normal(size=layout.size)
    params, shown = layout.split(weights), contexts.candidates
    users, items = unit(contexts.shared.astype(float)), unit(shown.features.astype(float))
    owners = np.repeat(np.arange(3), [3, 1, 4])
    expected = ((users @ params["user"])[owners] * (items @ params["item"])).sum(axis=1)
    expected += items @ params["own"][:, 0] + params["bias"]
    found = make_predictor(model, layout).predict(weights, contexts)
    np.testing.assert_allclose(found.mean, expected, rtol=0, atol=1e-6)  # features are float32
    np.testing.assert_array_equal(found.bounds, shown.bounds)
    by_torch = TorchPredictor(model, layout).predict(weights, contexts)
    np.testing.assert_allclose(by_torch.mean, found.mean, rtol=0, atol=1e-12)
    one = make_predictor(model, layout).predict(weights, contexts.take(np.array([2])))
    np.testing.assert_array_equal(one.mean, found.mean[4:])  # whoever stands beside it


@pytest.mark.slow
def test_it_learns_what_users_like(tmp_path):
    dataset = open_dataset(str(gallery.generate(tmp_path / "gallery", users=120)))
    settings = {
        "scenario": "scratch", "rounds": 60, "deploy_every": 2, "clients_per_round": 30, "threads": 1,
        "model": {"name": "two-tower", "size": 8}, "policy": {"name": "softmax", "beta": 0.05},
        "client": {"learning_rate": 0.5}, "server": {"learning_rate": 0.05},
    }  # fmt: skip
    rewards = [line["reward"] for line in simulate(Config.build(settings), dataset)]
    assert np.mean(rewards[-10:]) > np.mean(rewards[:5]) + 0.05


def test_it_needs_candidates():
    with pytest.raises(ConfigError, match="two-tower scores candidates"):
        build_model("two-tower", DataSpec("dense", (3,), 4))
    with pytest.raises(ConfigError, match=r"model\.size: must be at least 1"):
        build_model("two-tower", SPEC, {"size": 0})
