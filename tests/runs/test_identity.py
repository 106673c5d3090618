"""A run is continued and reused by nothing but itself: the same data, results and source of the user's own parts."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from builders import random_text
from command_line import fedbandit
from small_runs import make_run, small_config

from fedbandit import simulation as pretraining
from fedbandit.assembly import experiment as experiments
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core import identity as sources
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.identity import RESULTS, source_digests
from fedbandit.core.prediction import Prediction
from fedbandit.data import open_dataset
from fedbandit.results.reading import read_record
from fedbandit.runs import folder as identity
from fedbandit.runs.run import run

POLICY = """
import numpy as np
{imports}

class Mine:
    def probabilities(self, prediction, available=None):
        n, k = prediction.mean.shape
        return np.full((n, k), 1 / k){more}
"""
RUN = (
    "run",
    "so-scratch-greedy",
    "--set",
    "policy.name=my_policy:Mine",
    "--set",
    "clients_per_round=4",
    "-q",
)


def write(folder, more="", imports="", name="my_policy"):
    (folder / f"{name}.py").write_text(POLICY.format(more=more, imports=imports), encoding="utf-8")


def fails(result, *words):
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    for word in words:
        assert word in result.stderr


def test_an_edited_policy_is_refused_when_the_run_is_finished_and_when_it_is_not(tmp_path):
    write(tmp_path)
    assert fedbandit(*RUN, "--rounds", 2, "--out", "run", cwd=tmp_path).returncode == 0
    same = fedbandit(*RUN, "--rounds", 2, "--out", "run", cwd=tmp_path)
    assert "already finished" in same.stdout
    write(tmp_path, more="  # edited")
    fails(
        fedbandit(*RUN, "--rounds", 2, "--out", "run", cwd=tmp_path),
        "already finished; my_policy.py has changed",
    )
    (tmp_path / "run" / "summary.json").unlink()
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    fails(
        fedbandit(*RUN, "--rounds", 2, "--out", "run", cwd=tmp_path),
        "my_policy.py has changed",
        "nothing was over",
    )
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines


def in_a_process(code, folder):
    """What a new Python prints, in a folder whose modules it finds."""
    places = os.pathsep.join([str(folder), *(place for place in sys.path if place)])
    compiling = {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": "",
    }  # as it is unless somebody changes it
    environment = {**os.environ, "PYTHONPATH": places, **compiling}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_an_edit_in_the_same_second_and_of_the_same_size_is_executed(tmp_path):
    part = tmp_path / "same_second.py"
    part.write_text("VALUE = 1\n")
    os.utime(part, (10**9, 10**9))
    assert (
        in_a_process("import same_second; print(same_second.VALUE)", tmp_path) == "1"
    )  # leaves a compiled file
    assert list(tmp_path.glob("__pycache__/same_second*"))
    part.write_text("VALUE = 2\n")
    os.utime(part, (10**9, 10**9))
    assert (
        in_a_process("import same_second; print(same_second.VALUE)", tmp_path) == "1"
    )  # Python's own import is stale
    code = "from fedbandit.core.parts import resolve; print(resolve('policy.name', 'same_second:VALUE', {}))"
    assert in_a_process(code, tmp_path) == "2"


def test_the_digest_is_of_what_was_executed_and_covers_what_it_imports(tmp_path, monkeypatch):
    from fedbandit.core.parts import resolve

    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "ours_of_identity"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("SCALE = 1.0\n")
    (package / "part.py").write_text("import json\nfrom .helper import SCALE\nclass Mine: pass\n")
    name = "ours_of_identity.part:Mine"
    resolve("policy.name", name, {})
    before = source_digests([name, "softmax"])
    assert set(before) == {f"ours_of_identity/{file}.py" for file in ("__init__", "helper", "part")}
    (package / "helper.py").write_text("SCALE = 2.0\n")
    assert source_digests([name]) == before  # this process keeps what it has loaded
    code = (
        f"from fedbandit.core.parts import resolve; from fedbandit.core.identity import RESULTS, source_digests;"
        f"resolve('x', '{name}', {{}}); import json; print(json.dumps(source_digests(['{name}'])))"
    )
    after = json.loads(in_a_process(code, tmp_path))
    assert [file for file in before if before[file] != after[file]] == [
        "ours_of_identity/helper.py"
    ]


def test_built_in_parts_have_no_source_of_their_own():
    assert source_digests(["softmax", "adam", "fedbandit.policies:Softmax"]) == {}


def test_another_results_number_is_refused(tmp_path, monkeypatch):
    config = make_run(tmp_path / "run", rounds=3)
    monkeypatch.setattr(identity, "RESULTS", RESULTS + 1)
    with pytest.raises(
        ConfigError,
        match=rf"already finished; .*results number {RESULTS} there and {RESULTS + 1} here",
    ):
        run(config, tmp_path / "run", dataset=random_text())


def test_a_run_of_an_earlier_version_is_refused_as_such(tmp_path):
    """Its files name no run: neither resumed nor reported, and not called damaged."""
    config, out = make_run(tmp_path / "run", rounds=2), tmp_path / "run"
    path = out / "environment.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    earlier = {key: value for key, value in kept.items() if key not in ("run", "files")}
    path.write_text(json.dumps({**earlier, "results": 3}), encoding="utf-8")
    for read in (lambda: run(config, out, dataset=random_text()), lambda: read_record(out, "run")):
        with pytest.raises(DataError, match=r"run: of a run of fedbandit 0\.2 or earlier"):
            read()


def test_the_defaults_that_were_used_are_recorded(tmp_path):
    config = small_config(policy={"name": "softmax"}, rounds=1)
    assert "beta" not in config.policy.parameters
    run(config, tmp_path / "run", dataset=random_text())
    parts = json.loads((tmp_path / "run" / "environment.json").read_text())["parts"]
    assert parts["policy"] == {"name": "softmax", "beta": 0.05}
    assert parts["server"]["optimizer"] == "adam"
    assert parts["server"]["learning_rate"] == 0.05
    assert set(parts) == {
        "environment",
        "policy",
        "objective",
        "model",
        "server",
        "algorithm",
        "compression",
        "aggregation",
    }


def test_pretrained_models_are_kept_by_results_and_sources_not_by_version(tmp_path, monkeypatch):
    config = small_config(scenario="init", pretraining__rounds=1, pretraining__clients=6)
    experiment = build_experiment(config, random_text())
    first = pretraining.pretrained_file(experiment)
    assert pretraining.pretrained_file(experiment) == first
    monkeypatch.setattr("fedbandit.__version__", "9.9")
    assert pretraining.pretrained_file(experiment) == first
    monkeypatch.setattr(pretraining, "RESULTS", RESULTS + 1)
    assert pretraining.pretrained_file(experiment) != first


# Engines


PART = """
import numpy as np
from helping_a_worker import share

class Mine:
    def probabilities(self, prediction, available=None):
        n, k = prediction.mean.shape
        first = np.zeros((n, k))
        first[:, {action}] = 1.0
        return share(first)
"""


@pytest.fixture
def recipe_of(tmp_path, monkeypatch, tiny_text):
    """A recipe as a driver makes it whose file for the policy chooses that action; the file is as old as ever."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helping_a_worker.py").write_text("def share(p):\n    return p\n")

    def make(action):
        for name in ("part_of_a_worker", "helping_a_worker"):  # a driver is a process of its own
            sys.modules.pop(name, None)
            sources._executed.pop(name, None)
        write_part(tmp_path, action)
        config = small_config(policy__name="part_of_a_worker:Mine")
        return build_experiment(config, open_dataset(tiny_text)).bandit.work.recipe

    yield make
    for name in ("part_of_a_worker", "helping_a_worker"):
        sys.modules.pop(name, None)
        sources._executed.pop(name, None)


def write_part(folder, action):
    """Always of the same size, and never newer: Python's own compiled file would be taken for it."""
    (folder / "part_of_a_worker.py").write_text(PART.format(action=action))
    os.utime(folder / "part_of_a_worker.py", (10**9, 10**9))


def chooses(work):
    return int(work.policy.probabilities(Prediction(np.zeros((1, 6)))).argmax())


def test_a_worker_loads_an_edited_part_anew_and_refuses_what_it_does_not_have(recipe_of, tmp_path):
    first, second = recipe_of(1), recipe_of(2)
    assert first.digest != second.digest
    write_part(tmp_path, 1)
    for name in ("part_of_a_worker", "helping_a_worker"):  # a worker is a process of its own
        sys.modules.pop(name), sources._executed.pop(name)
    assert chooses(first.make()) == 1
    write_part(tmp_path, 2)  # edited while the worker lives
    assert chooses(second.make()) == 2
    with pytest.raises(ConfigError, match=r"^part_of_a_worker\.py: is other code on this machine"):
        first.make()
    (tmp_path / "helping_a_worker.py").write_text("def share(p):\n    return p[:, ::-1]\n")
    for name in ("part_of_a_worker", "helping_a_worker"):
        sys.modules.pop(name), sources._executed.pop(name)
    experiments._experiment_from.cache_clear()
    with pytest.raises(ConfigError, match=r"^helping_a_worker\.py: is other code on this machine"):
        second.make()


def test_a_worker_compiles_from_source_whoever_imports(tmp_path):
    """What unpickles a user's object imports his module before any recipe is made."""
    part = tmp_path / "same_second.py"
    part.write_text("VALUE = 1\n")
    os.utime(part, (10**9, 10**9))
    assert in_a_process("import same_second; print(same_second.VALUE)", tmp_path) == "1"
    part.write_text("VALUE = 2\n")
    os.utime(part, (10**9, 10**9))
    code = "from fedbandit.core.identity import always_compile; always_compile(); import same_second as s; print(s.VALUE)"
    assert in_a_process(code, tmp_path) == "2"
