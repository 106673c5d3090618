"""Code that a file from elsewhere names runs only where the user says so."""

import os
import subprocess
import sys

import numpy as np
import pytest
from core_samples import config, images

from fedbandit import Agent, Results
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.parts import require_trust, trusting
from fedbandit.deploy import DeviceModel
from fedbandit.presets import load
from fedbandit.runs.index import read_runs
from fedbandit.runs.run import execute
from fedbandit.studies.trained_models import load_scorer

PART = """
from pathlib import Path
from fedbandit.models import Model, build_model
from fedbandit.policies import Softmax

Path("{marker}").touch()

def Linear(data):
    return build_model("linear", data)

class Cooling:
    def __init__(self, beta: float = 0.5):
        self.beta = beta
    def probabilities(self, prediction, available=None):
        return Softmax(self.beta).probabilities(prediction, available)
    def at(self, progress):
        return Inner(self.beta / (1 + progress.version))

class Inner:
    def __init__(self, beta: float = 1.0):
        self.beta = beta
    def probabilities(self, prediction, available=None):
        return Softmax(self.beta).probabilities(prediction, available)
"""


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """A run folder that somebody sent, with the module that it names beside the commands."""
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "executed"
    (tmp_path / "from_afar.py").write_text(PART.format(marker=marker))
    data = images()
    with_code = config(rounds=2).with_values({"model.name": "from_afar:Linear"})
    execute(with_code, tmp_path / "run", dataset=data)
    forget(marker)
    yield tmp_path / "run", data, marker
    sys.modules.pop("from_afar", None)


def forget(marker):
    sys.modules.pop("from_afar", None)
    marker.unlink(missing_ok=True)


def test_a_name_is_refused_with_what_to_type():
    require_trust(["softmax", "linear"], "a file")
    with pytest.raises(DataError) as refused:
        require_trust(["softmax", "mine:Rule"], "a file")
    assert "a file: names 'mine:Rule'" in str(refused.value)
    assert "--trust mine:Rule" in str(refused.value)
    for trusted in ("mine:Rule", "mine"):
        with trusting(trusted):
            require_trust(["mine:Rule"], "a file")
    with trusting("mine:Other"), pytest.raises(DataError):
        require_trust(["mine:Rule"], "a file")


def test_a_model_of_a_run_folder_executes_nothing_unasked(sent):
    run, data, marker = sent
    with pytest.raises(DataError, match="--trust from_afar:Linear"):
        load_scorer(run, data.header)
    assert not marker.exists()
    with trusting("from_afar:Linear"):
        load_scorer(run, data.header)
    assert marker.exists()


def test_a_model_file_executes_nothing_unasked(sent):
    run, data, marker = sent
    header, weights = data.header, load_weights(run, data)
    forget(marker)
    model = DeviceModel(
        version=1,
        kind=header.kind,
        shape=header.shape,
        actions=header.actions,
        policy={"name": "greedy"},
        model={"name": "from_afar:Linear"},
        weights=weights,
    )
    file = run.parent / "model.safetensors"
    file.write_bytes(model.to_bytes())
    with pytest.raises(DataError, match="--trust from_afar:Linear"):
        load_scorer(file, header)
    agent = Agent(run.parent / "agent")
    with pytest.raises(DataError, match="does not trust"):
        agent.install(file)
    assert not marker.exists()
    with trusting("from_afar:Linear"):
        load_scorer(file, header)
    assert marker.exists()


def load_weights(run, data):
    with trusting("from_afar"):
        scorer = load_scorer(run, data.header)
    k = data.header.num_actions
    return {"weight": scorer.weights[:-k].reshape(-1, k), "bias": scorer.weights[-k:]}


def test_looking_at_a_run_executes_nothing(sent):
    run, _, marker = sent
    runs, problems = read_runs([run])
    assert (len(runs), problems) == (1, [])
    assert len(Results.open(run)["reward"]) == 2
    assert not marker.exists()


def test_the_configuration_of_a_run_folder_is_from_elsewhere(sent):
    run, _, marker = sent
    with pytest.raises(DataError, match="--trust from_afar:Linear"):
        load(str(run / "config.toml"))
    assert not marker.exists()
    with trusting("from_afar:Linear"):
        assert load(str(run / "config.toml")).rounds == 2
    own = run.parent / "own.toml"
    own.write_bytes((run / "config.toml").read_bytes())
    assert isinstance(load(str(own)), Config)  # the user's own, wherever it was copied from


COMMANDS = {
    "run": ["run", "{run}/config.toml", "-o", "{run}"],
    "tune": ["tune", "{run}/config.toml"],
    "regret": ["regret", "{run}"],
    "compare": ["compare", "{run}/config.toml", "-o", "compared", "--seeds", "1"],
    "bakeoff": ["bakeoff", "spec.toml", "-o", "crossed", "--dry-run"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_refuse_in_one_line(sent, name):
    run, _, marker = sent
    arguments = [part.format(run=run) for part in COMMANDS[name]]
    spec = f'start = "{run}/config.toml"\n[situations.data.own]\n[contenders.rule.greedy]\n'
    (run.parent / "spec.toml").write_text(spec)
    done = command(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    assert "--trust from_afar:Linear" in done.stderr
    assert not marker.exists()
    if name != "compare":
        command(*arguments, "--trust", "from_afar:Linear")
        assert marker.exists()


@pytest.mark.parametrize("name", ["report", "watch", "data", "presets"])
def test_other_commands_have_no_trust_to_give(name):
    assert command(name, "--trust", "a:B").returncode == 2


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "fedbandit", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
    )


def test_a_module_that_the_command_line_names_is_trusted(sent):
    run, _, marker = sent
    arguments = ["run", str(run / "config.toml"), "-o", "other", "--rounds", "1", "--quiet"]
    done = command(*arguments, "--set", "policy.name=from_afar:Inner")
    assert "--trust" not in done.stderr
    assert marker.exists()


def test_a_schedule_is_trusted_by_its_own_name(sent, tmp_path):
    _, data, _ = sent
    cooling = config(rounds=2).with_values({"policy.name": "from_afar:Cooling", "policy.beta": 0.4})
    from fedbandit.assembly.experiment import build_experiment
    from fedbandit.core.prediction import Progress

    experiment = build_experiment(cooling, data)
    progress = Progress(version=3, actions=data.header.num_actions)
    model = DeviceModel.of_experiment(
        experiment, experiment.initial_weights(), version=3, progress=progress
    )
    assert model.policy["name"] == "from_afar:Cooling"
    agent = Agent(tmp_path / "agent", trusted=["from_afar:Cooling"])
    agent.install(model.to_bytes())
    assert agent._used().actor.rule.beta == pytest.approx(0.1)
    with pytest.raises(DataError, match="does not trust"):
        Agent(tmp_path / "other", trusted=["from_afar:Inner"]).install(model.to_bytes())
    context = np.zeros(data.header.shape, np.float32)
    assert agent.choose(context) is not None


def test_trust_is_for_names_of_code():
    with pytest.raises(ConfigError, match="--trust"), trusting("not a name"):
        pass
