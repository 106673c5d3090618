"""The user files of the docs: from the command line, Python and Ray, killed and resumed, the same bytes.

Each stands on a page as a reader would copy it, within the number of lines that the seam promises.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedbandit import simulate
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.data.embedded import gallery
from fedbandit.runs.run import execute

DOCS = Path(__file__).parents[1] / "docs"
NOTES = {
    "scenario": "scratch",
    "rounds": 6,
    "deploy_every": 2,
    "clients_per_round": 8,
    "threads": 1,
}
FILES = {
    "my_linucb": (
        "your-own-parts.md",
        60,
        {"algorithm": {"name": "my_linucb:LinUcb"}, "policy": {"name": "ucb", "floor": 0.05}},
    ),
    "my_personal": (
        "your-own-parts.md",
        40,
        {"algorithm": {"name": "my_personal:PersonalBias", "prior": 2.0}},
    ),
    "item_taste": ("candidates.md", 40, {"model": {"name": "item_taste:item_taste"}}),
    "clicks": ("environments.md", 20, {"environment": {"name": "clicks:Clicks", "right": 0.9}}),
}


def source(name):
    """The file as it stands on its page."""
    page = (DOCS / FILES[name][0]).read_text(encoding="utf-8")
    found = re.search(rf"<!-- file: {name}\.py -->\n```python\n(.*?)^```", page, re.S | re.M)
    assert found, f"{name}.py is not on {FILES[name][0]}"
    return found[1]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of small data sets: notes with text, and a gallery."""
    folder = tmp_path_factory.mktemp("data")
    page = (DOCS / "your-own-parts.md").read_text(encoding="utf-8")
    made = re.search(r"```python\n(import csv.*?)^```", page, re.S | re.M)
    subprocess.run([sys.executable, "-c", made[1]], cwd=folder, check=True)
    command = "data import table notes.csv --client user --text note --labels topic -o notes"
    subprocess.run([sys.executable, "-m", "fedbandit", *command.split()], cwd=folder, check=True)
    gallery.generate(folder / "gallery", users=30)
    return folder


@pytest.fixture
def chosen(request, data, tmp_path, monkeypatch):
    """The configuration with a user file, which lies in the working folder."""
    name = request.param
    (tmp_path / f"{name}.py").write_text(source(name), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    at = data / ("gallery" if name == "item_taste" else "notes")
    return Config.build({**NOTES, **FILES[name][2], "data": {"source": str(at)}})


every_file = pytest.mark.parametrize("chosen", FILES, indirect=True)


def lines(folder):
    """Every round's metrics as they were written, without the first line, which names the run."""
    return (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[1:]


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_as_short_as_promised(name):
    assert len(source(name).splitlines()) <= FILES[name][1]  # blank ones too


@every_file
def test_python_the_command_line_and_a_pause_give_the_same_bytes(chosen, tmp_path):
    expected = [json.dumps(line) for line in simulate(chosen)]
    for until in (3, None):
        execute(chosen, tmp_path / "paused", until=until)
    assert lines(tmp_path / "paused") == expected
    (tmp_path / "run.toml").write_text(chosen.to_toml(), encoding="utf-8")
    command = [sys.executable, "-m", "fedbandit", "run", "run.toml", "-o", "told", "--quiet"]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "NO_COLOR": "1"})
    assert lines(tmp_path / "told") == expected


@pytest.mark.slow
@every_file
def test_on_ray_and_after_a_kill_too(chosen, tmp_path):
    from fedbandit.engines import RayEngine

    pytest.importorskip("ray")
    expected = [json.dumps(line) for line in simulate(chosen)]
    engine = RayEngine()
    try:
        assert [json.dumps(line) for line in simulate(chosen, engine=engine)] == expected
    finally:
        engine.close()
    (tmp_path / "run.toml").write_text(chosen.to_toml(), encoding="utf-8")
    dying = (
        "import os, signal\nfrom fedbandit import Config\nfrom fedbandit.runs.run import execute\n"
        "from fedbandit.config import read_toml\n"
        "def stop(state, events, metrics):\n"
        "    if metrics['round'] == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "execute(Config.build(read_toml('run.toml')), __import__('pathlib').Path('killed'), callbacks=[stop])\n"
    )
    killed = subprocess.run([sys.executable, "-c", dying], cwd=tmp_path, check=False)
    assert killed.returncode == -9
    execute(chosen, tmp_path / "killed")
    assert lines(tmp_path / "killed") == expected


def test_personal_parts_are_refused_where_the_past_is_not_known(data, tmp_path, monkeypatch):
    (tmp_path / "my_personal.py").write_text(source("my_personal"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    base = {**NOTES, **FILES["my_personal"][2], "data": {"source": str(data / "notes")}}
    with pytest.raises(ConfigError, match=r"what a client of .* held in the past is not known"):
        simulate(Config.build({**base, "mode": "population"}))
    with pytest.raises(ConfigError, match=r"gate\.confidence: the gate weighs the deployed model"):
        simulate(Config.build({**base, "gate": {"confidence": 0.9}}))
    with pytest.raises(ConfigError, match="events cannot be computed again"):
        list(simulate(Config.build(base), callbacks=[lambda state, events, metrics: events()]))


@pytest.mark.parametrize("chosen", ["my_personal"], indirect=True)
def test_a_client_acts_with_its_own_bias_and_sends_nothing_of_it(chosen, monkeypatch):
    import my_personal
    import numpy as np

    seen, plain = [], chosen.with_values({"clients_per_round": 37, "policy.beta": 0.3})
    original = my_personal.PersonalBias.personal

    def spy(self, received, memory):
        found = original(self, received, memory)
        counts, errors = np.split(np.asarray(memory["tables"]), 2)
        moved = self.layout.split(found["weights"] - received["weights"])
        np.testing.assert_allclose(moved["bias"], errors / (2.0 + counts), rtol=1e-4, atol=1e-6)
        assert not moved["weight"].any()
        seen.append(int(counts.sum()))
        return found

    monkeypatch.setattr(my_personal.PersonalBias, "personal", spy)
    own = list(simulate(plain))
    assert seen[:37] == [10] * 37  # in round 2 everybody remembers the ten events of round 1
    assert seen[37:74] == [20] * 37
    fedavg = list(simulate(plain.with_values({"algorithm": {"name": "fedavg"}})))
    assert own[0] == fedavg[0]
    assert own[1] != fedavg[1]
