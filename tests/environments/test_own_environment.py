"""The environment of docs/environments.md: from the command line, Python and Ray, killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import COMMAND, fails_with_one_line, fedbandit

from fedbandit.config import Config
from fedbandit.core import identity as sources
from fedbandit.data import FederatedDataset
from fedbandit.data.embedded import topics
from fedbandit.runs.run import run
from fedbandit.simulation import simulate

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
ROUNDS = 40
SETTINGS = {
    "scenario": "drift",
    "drift": {"at": [20], "start": "init"},
    "pretraining": {"rounds": 2, "clients": 20},
    "deploy_every": 5,
    "clients_per_round": 15,
    "rounds": ROUNDS,
    "environment": {"name": "clicks:Clicks", "right": 0.9, "missing": 0.1},
}


def written(text):
    """The user's file as the page has it."""
    return text.split("<!-- file: clicks.py -->\n```python\n")[1].split("```")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: the file of the page, a data set, a configuration, and a finished run."""
    home = tmp_path_factory.mktemp("home")
    (home / "clicks.py").write_text(written(PAGE.read_text(encoding="utf-8")))
    topics.generate(home / "data", users=120, words=1000)
    (home / "world.toml").write_text(
        Config.build({**SETTINGS, "data": {"source": str(home / "data")}}).to_toml()
    )
    ended = fedbandit("run", "world.toml", "-o", "whole", "-q", cwd=home)
    assert ended.returncode == 0, ended.stderr
    return home


@pytest.fixture
def importable(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop("clicks", None)
    sources._executed.pop("clicks", None)


def metrics(path):
    return (path / "metrics.jsonl").read_bytes()


def test_the_file_of_the_page_is_short():
    assert len(written(PAGE.read_text(encoding="utf-8")).splitlines()) <= 20


def test_killed_and_resumed_it_writes_the_same_bytes(folder):
    out = folder / "killed"
    command = [*COMMAND, "run", "world.toml", "-o", "killed", "-q", "--checkpoint-seconds", "0"]
    for after in (5, 25):
        process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if any(int(p.stem[6:]) >= after for p in out.glob("checkpoints/round-*.safetensors")):
                break
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert not (out / "summary.json").exists()
    ended = fedbandit("run", "world.toml", "-o", "killed", "-q", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert metrics(out) == metrics(folder / "whole")


def test_python_computes_the_same_and_it_is_part_of_the_identity(folder, importable, monkeypatch):
    monkeypatch.setenv("FEDBANDIT_CACHE", str(folder / "cache"))
    config = Config.from_toml(folder / "world.toml")
    dataset = FederatedDataset.open(folder / "data")
    lines = [json.loads(line) for line in metrics(folder / "whole").splitlines()[1:]]
    found = list(simulate(config, dataset))
    assert found == lines
    assert {"regret", "missing"} <= found[0].keys()
    shown = json.loads((folder / "whole" / "summary.json").read_text())["environment"]
    assert (shown["name"], shown["right"], shown["missing"]) == ("clicks:Clicks", 0.9, 0.1)

    changed = config.with_values({"environment.right": 0.8})
    with pytest.raises(Exception, match=r"environment\.right"):
        run(changed, folder / "whole", dataset=dataset)


def test_an_edited_file_is_not_continued_without_a_word(folder):
    shorter = ("run", "world.toml", "-o", "edited", "-q")
    assert fedbandit(*shorter, "--rounds", 3, cwd=folder).returncode == 0
    text = (folder / "clicks.py").read_text()
    (folder / "clicks.py").write_text(text.replace("0.98", "0.97"))
    try:
        ended = fedbandit(*shorter, "--rounds", 6, cwd=folder)
    finally:
        (folder / "clicks.py").write_text(text)
    fails_with_one_line(ended, "clicks.py")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Ray's own making
def test_ray_writes_the_same_bytes(folder):
    pytest.importorskip("ray")
    ended = fedbandit(
        "run", "world.toml", "-o", "on-ray", "-q", "--set", "engine=ray",
        cwd=folder, PYTHONPATH=os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        FEDBANDIT_CACHE=str(folder / "ray-cache"),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert metrics(folder / "on-ray") == metrics(folder / "whole")
