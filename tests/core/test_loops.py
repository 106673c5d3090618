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

from fedbandit.core import kernels, loops
from fedbandit.core.errors import ConfigError
from fedbandit.core.loops import COMPILE_AFTER_SECONDS, Kernels
from fedbandit.models.kernels import sparse_kernels, sparse_loops

COMPILED = SimpleNamespace(both=lambda: "compiled", declined=lambda: "compiled")


@pytest.fixture
def kernels_of_two(monkeypatch):
    """Loops with a compiled form in a made-up module; each says which form it is."""
    monkeypatch.setattr(loops, "import_module", {"compiled": COMPILED}.__getitem__)
    monkeypatch.delenv(COMPILE_AFTER_SECONDS)
    made = Kernels("compiled", after=1.0)

    @made
    def both():
        return "numpy"

    @made
    def declined():
        return NotImplemented

    return SimpleNamespace(kernels=made, both=both, declined=declined)


def test_the_numpy_form_is_used_until_it_has_had_its_time(kernels_of_two, monkeypatch):
    clock = iter([0.0, 0.6, 1.0, 1.6])
    monkeypatch.setattr(loops, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    pair = kernels_of_two
    assert [pair.both(), pair.kernels.in_use, pair.both(), pair.kernels.in_use] == [
        "numpy",
        False,
        "numpy",
        True,
    ]
    assert [pair.both(), pair.both(), pair.both.numpy()] == ["compiled", "compiled", "numpy"]


def test_what_the_numpy_form_declines_is_compiled(kernels_of_two):
    assert (kernels_of_two.declined(), kernels_of_two.both()) == ("compiled", "numpy")


@pytest.mark.parametrize(
    ("seconds", "used"), [("0", "compiled"), ("inf", "numpy"), ("0.5", "numpy")]
)
def test_when_to_compile_is_a_setting_of_the_environment(
    kernels_of_two, monkeypatch, seconds, used
):
    monkeypatch.setenv(COMPILE_AFTER_SECONDS, seconds)
    assert kernels_of_two.both() == used


def test_a_time_to_compile_that_is_no_number_is_refused(kernels_of_two, monkeypatch):
    monkeypatch.setenv(COMPILE_AFTER_SECONDS, "much")
    said = "FEDBANDIT_COMPILE_AFTER_SECONDS: should be a number of seconds, not 'much'"
    with pytest.raises(ConfigError, match=said):
        kernels_of_two.both()


def test_without_numba_the_numpy_form_is_used_for_good(kernels_of_two, monkeypatch):
    monkeypatch.setenv(COMPILE_AFTER_SECONDS, "0")
    monkeypatch.setattr(loops, "find_spec", lambda name: None)
    assert kernels_of_two.both() == "numpy"
    assert not kernels_of_two.kernels.in_use


def test_every_loop_has_a_compiled_form():
    for module, compiled in ((loops, kernels), (sparse_loops, sparse_kernels)):
        named = [name for name, found in vars(module).items() if isinstance(found, loops.Loop)]
        assert len(named) >= 3
        assert all(hasattr(compiled, name) for name in named)


def forms(loop):
    """A loop's two forms."""
    return loop.numpy, loop.compiled


def assert_same(mine, other):
    assert mine.dtype == other.dtype
    np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("pull", "drifts"), [(0, False), (0.3, False), (0, True), (0.3, True)])
def test_linear_models_on_text_score_and_train_alike(dtype, seed, pull, drifts):
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
    drift = rng.normal(size=weight.size + k if drifts else 0).astype(dtype)
    found = []
    score, train = forms(sparse_loops.scores), forms(sparse_loops.train_chosen)
    for score_all, train_chosen in zip(score, train, strict=True):
        scores, norms = np.empty((n, k), dtype), np.zeros(len(clip_norms))
        score_all(weight, bias, texts.offsets, texts.ids, values, scores)
        entries, moves = np.empty(len(texts.ids), np.int64), np.empty(len(texts.ids), dtype)
        total_bias = np.zeros_like(bias)
        count = train_chosen(
            texts.offsets, texts.ids, values, split.offsets, actions, rewards, weights, False, steps, 4, 2, clip_norms,
            drift.dtype.type(0.1), drift.dtype.type(pull), drift,
            weight.reshape(-1), bias, entries, moves, total_bias, norms,
        )  # fmt: skip
        found.append((scores, entries[:count], moves[:count], total_bias, norms))
    for mine, other in zip(*found, strict=True):
        assert_same(mine, other)
    assert (found[0][-1] > 0.1).any()  # something was clipped


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(4))
def test_curvatures_are_alike(dtype, seed):
    rng, split, k = np.random.default_rng(seed), random_text(seed).train, 6
    texts, n = split.features, len(split.features)
    weight, bias = rng.normal(size=(texts.ids.max() + 1, k)), rng.normal(size=k)
    logged = rng.random(n), rng.random(n)
    weight, bias, rewards, counts = (part.astype(dtype) for part in (weight, bias, *logged))
    actions, found = rng.integers(0, k, n), []
    for curvature_chosen in forms(sparse_loops.curvature_chosen):
        entries, moments = np.empty(len(texts.ids), np.int64), np.empty((2, len(texts.ids)), dtype)
        biases, norms = np.zeros((2, k), dtype), np.zeros(len(split.offsets) - 1)
        count = curvature_chosen(
            texts.offsets, texts.ids, texts.values.astype(dtype), split.offsets, actions, rewards,
            counts, 2.0, weight.reshape(-1), bias, entries, moments, biases, norms,
        )  # fmt: skip
        found.append((entries[:count], moments[:, :count], biases, norms))
    for mine, other in zip(*found, strict=True):
        assert_same(mine, other)
    assert (found[0][-1] > 2.0).any()  # something was clipped


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_steps_of_adam_and_sums_are_alike(dtype):
    rng = np.random.default_rng(0)
    m, v, w, update = (rng.random(1000).astype(dtype) for _ in range(4))
    constants = np.array([0.01, 0.9, 0.999, 1e-7], dtype)
    entries, values = rng.integers(0, 1000, 5000), rng.normal(size=5000).astype(dtype)
    found = []
    pairs = zip(forms(loops.adam_moments), forms(loops.add_rows), strict=True)
    for adam_moments, add_rows in pairs:
        outs = [np.empty(1000, dtype) for _ in range(3)]
        adam_moments(m, v, w, update, constants, *outs)
        rows = w.reshape(100, 10).copy()
        add_rows(entries[:50] % 100, values[:500].reshape(50, 10), rows)
        found.append([*outs, rows])
    for mine, other in zip(*found, strict=True):
        assert_same(mine, other)


@pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 3), (4, 0), (7, 5), (300, 40)])
def test_sparse_sums_are_alike(n, m):
    rng = np.random.default_rng(n)
    one, other = (np.sort(rng.choice(400, size, replace=False)) for size in (n, m))
    values, others = (rng.choice([0.0, -0.0, 1.5, -1e300, 0.1], size) for size in (n, m))
    for times in (1.0, -1.0, 0.0):
        found = []
        for merge in forms(loops.merge):
            entries, sums = np.empty(n + m, np.int64), np.empty(n + m)
            count = merge(one, values, other, others, times, entries, sums)
            np.testing.assert_array_equal(entries[:count], np.union1d(one, other))
            found.append((entries[:count], sums[:count]))
        for mine, theirs in zip(*found, strict=True):
            assert_same(mine, theirs)
        whole = np.zeros((2, 400))
        whole[0, one], whole[1, other] = values, others
        expected = whole[0] + times * whole[1] if times else np.where(whole[0], *whole)
        if times or not (values == 0).any():
            np.testing.assert_array_equal(sums[:count], expected[entries[:count]])


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
        environment = {**os.environ, COMPILE_AFTER_SECONDS: patience}
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
