"""Plain and compiled loops: which of them is used when, and the same bits from both."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from builders import random_text
from safetensors.numpy import load_file

from fedbandit.core import kernels, loops, plain
from fedbandit.core.errors import ConfigError
from fedbandit.core.loops import PATIENCE, Loops
from fedbandit.data.embedded import topics_kernels, topics_plain
from fedbandit.data.embedded.topics import generate
from fedbandit.models.kernels import sparse_kernels, sparse_plain


@pytest.fixture
def pair(monkeypatch):
    """Loops over two made-up modules, whose functions say where they are from."""
    found = {
        "plain": SimpleNamespace(both=lambda: "plain", declined=lambda: NotImplemented),
        "compiled": SimpleNamespace(
            both=lambda: "compiled", declined=lambda: "compiled", alone=lambda: "compiled"
        ),
    }
    monkeypatch.setattr(loops, "import_module", found.__getitem__)
    monkeypatch.delenv(PATIENCE)
    return Loops("plain", "compiled", patience=1.0)


def test_the_plain_form_is_used_until_it_has_had_its_time(pair, monkeypatch):
    clock = iter([0.0, 0.6, 1.0, 1.6])
    monkeypatch.setattr(loops, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert [pair.both(), pair.compiling, pair.both(), pair.compiling] == [
        "plain",
        False,
        "plain",
        True,
    ]
    assert [pair.both(), pair.both()] == ["compiled", "compiled"]


def test_what_has_no_plain_form_is_compiled(pair):
    assert (pair.alone(), pair.declined(), pair.both()) == ("compiled", "compiled", "plain")


@pytest.mark.parametrize(
    ("patience", "used"), [("0", "compiled"), ("inf", "plain"), ("0.5", "plain")]
)
def test_patience_is_a_setting_of_the_environment(pair, monkeypatch, patience, used):
    monkeypatch.setenv(PATIENCE, patience)
    assert pair.both() == used


def test_patience_that_is_no_number_is_refused(pair, monkeypatch):
    monkeypatch.setenv(PATIENCE, "much")
    with pytest.raises(
        ConfigError, match="FEDBANDIT_PATIENCE: should be a number of seconds, not 'much'"
    ):
        pair.both()


def test_without_numba_the_plain_form_is_used_for_good(pair, monkeypatch):
    monkeypatch.setenv(PATIENCE, "0")
    monkeypatch.setattr(loops, "find_spec", lambda name: None)
    assert pair.both() == "plain"
    assert not pair.compiling


def assert_same(mine, other):
    assert mine.dtype == other.dtype
    np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(4))
def test_linear_models_on_text_score_and_train_alike(dtype, seed):
    rng, split = np.random.default_rng(seed), random_text(seed).train
    texts, n = split.features, len(split.features)
    values, k = texts.values.astype(dtype), 6
    weight, bias = (
        rng.normal(size=(texts.ids.max() + 1, k)).astype(dtype),
        rng.normal(size=k).astype(dtype),
    )
    actions, rewards = rng.integers(0, k, n), rng.random(n).astype(dtype)
    weights, steps = rng.random(n).astype(dtype), rng.random(5).astype(dtype)
    clip_norms = np.where(np.arange(len(split.offsets) - 1) % 2, 0.1, 1e3)
    none = np.empty(0, dtype)
    found = []
    for form in (sparse_plain, sparse_kernels):
        scores, norms = np.empty((n, k), dtype), np.zeros(len(clip_norms))
        form.scores(weight, bias, texts.offsets, texts.ids, values, scores)
        entries, moves = np.empty(len(texts.ids), np.int64), np.empty(len(texts.ids), dtype)
        total_bias = np.zeros_like(bias)
        count = form.train_chosen(
            texts.offsets, texts.ids, values, split.offsets, actions, rewards, weights, False, steps, 4, 2, clip_norms,
            none.dtype.type(0.1), none.dtype.type(0), none, weight.reshape(-1), bias, entries, moves, total_bias, norms,
        )  # fmt: skip
        found.append((scores, entries[:count], moves[:count], total_bias, norms))
    for mine, other in zip(*found, strict=True):
        assert_same(mine, other)
    assert (found[0][-1] > 0.1).any()  # something was clipped


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_steps_of_adam_and_sums_are_alike(dtype):
    rng = np.random.default_rng(0)
    m, v, w, update = (rng.random(1000).astype(dtype) for _ in range(4))
    constants = np.array([0.01, 0.9, 0.999, 1e-7], dtype)
    entries, values = rng.integers(0, 1000, 5000), rng.normal(size=5000).astype(dtype)
    found = []
    for form in (plain, kernels):
        outs = [np.empty(1000, dtype) for _ in range(3)]
        form.adam_moments(m, v, w, update, constants, *outs)
        total = w.copy()
        form.add_entries(entries, values, total)
        found.append([*outs, total])
        for wrong in (np.nan, np.inf, -np.inf):
            assert form.all_finite(w)
            assert not form.all_finite(np.append(w, w.dtype.type(wrong)))
    for mine, other in zip(*found, strict=True):
        assert_same(mine, other)


def test_rewards_are_alike():
    rng, labels = np.random.default_rng(0), random_text(1, num_actions=6).train.labels
    actions, exact, near_value = (
        rng.integers(0, 6, len(labels)),
        *rng.random((2, 6)).astype(np.float32),
    )
    table = exact, np.array([1, -1, 0, 5, -1, 3], np.int32), near_value
    mine, other = (
        form.best_rewards(labels.offsets, labels.ids, actions, *table) for form in (plain, kernels)
    )
    assert_same(mine, other)
    assert len(set(mine)) > 3


def test_generated_texts_are_alike(tmp_path, monkeypatch):
    for form in (topics_plain, topics_kernels):
        monkeypatch.setattr("fedbandit.data.embedded.topics._drawing", form)
        generate(tmp_path / form.__name__, users=60, words=1500, like="stackoverflow")
    mine, other = (tmp_path / form.__name__ for form in (topics_plain, topics_kernels))
    assert (mine / "checksums.json").read_bytes() == (other / "checksums.json").read_bytes()


@pytest.mark.parametrize(
    "preset",
    [
        "so-scratch-softmax",
        pytest.param("so-scratch-falcon", marks=pytest.mark.slow),
        pytest.param("so-scratch-epsilon-greedy", marks=pytest.mark.slow),
    ],
)
def test_whole_runs_are_alike_and_short_ones_do_without_numba(tmp_path, preset):
    weights, metrics = [], []
    for patience, expected in (("inf", False), ("0", True)):
        out = tmp_path / patience
        command = [
            "run",
            preset,
            "--rounds",
            "4",
            "--set",
            "deploy_every=2",
            "--quiet",
            "--out",
            str(out),
        ]
        program = (
            f"import sys; from fedbandit.cli.app import program; program('run')({command!r}, standalone_mode=False);"
            " print('numba' in sys.modules)"
        )
        environment = {**os.environ, PATIENCE: patience}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert done.stdout.endswith(f"{expected}\n"), done.stderr
        weights.append(load_file(max((out / "checkpoints").glob("*.safetensors"))))
        metrics.append(
            [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        )
    assert metrics[0] == metrics[1]
    for name, vector in weights[0].items():
        assert_same(vector, weights[1][name])
