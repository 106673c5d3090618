"""Pre-training is seen, stops at Ctrl-C like any other round, and is resumed: the same bytes in the end."""

import signal
import threading
from contextlib import contextmanager

import pytest
from builders import random_text
from command_line import fails_with_one_line, in_this_process

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import Diverged
from fedbandit.engines import ThreadEngine
from fedbandit.runs import local_runner as many
from fedbandit.runs import reporting as progress
from fedbandit.runs.local_runner import Job, LocalRunner, prepare
from fedbandit.runs.run import execute, run
from fedbandit.simulation import starting_weights

CONFIG = Config.build(
    {
        "scenario": "init",
        "rounds": 3,
        "deploy_every": 2,
        "clients_per_round": 4,
        "client": {"learning_rate": 0.5},
        "server": {"learning_rate": 0.05},
        "pretraining": {"rounds": 6, "clients": 5},
        "clipping": {"quantile": 0.5},  # an adaptive norm crosses rounds too
    }
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of pre-trained models, empty at first."""
    monkeypatch.setenv("FEDBANDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pretrained"


class Following:
    """Writes down what it is told, and sends Ctrl-C in a round of its choice."""

    def __init__(self, stop=None):
        self.told, self.stop = [], stop

    @contextmanager
    def __call__(self, name, rounds, done):
        self.name = name
        self.told.append((name, rounds, done))
        yield self

    def update(self, metrics):
        self.told.append((self.name, metrics["round"]))
        if self.told[-1] == self.stop:
            signal.raise_signal(signal.SIGINT)


def test_pretraining_stops_after_the_round_and_goes_on_to_the_same_bytes(
    tmp_path, cache, monkeypatch
):
    dataset = random_text()
    first = Following(stop=("pre-training round", 2))
    stopped = execute(CONFIG, tmp_path / "run", dataset=dataset, progress=first)
    assert (stopped.summary, stopped.rounds, stopped.pretraining) == (None, 0, 2)
    assert len(list(cache.glob("*.unfinished.safetensors"))) == 1
    again = Following()
    assert execute(CONFIG, tmp_path / "run", dataset=dataset, progress=again).summary is not None
    assert again.told == [
        ("pre-training round", 6, 2),
        *(("pre-training round", number) for number in (3, 4, 5, 6)),
        ("round", 3, 0),
        *(("round", number) for number in (1, 2, 3)),
    ]
    assert [path.name.count(".") for path in cache.iterdir()] == [1]  # nothing unfinished is left
    monkeypatch.setenv("FEDBANDIT_CACHE", str(tmp_path / "another"))
    run(CONFIG, tmp_path / "undisturbed", dataset=dataset)
    one, other = (
        (tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "undisturbed")
    )
    assert one == other


def test_a_kept_model_is_not_shown_as_pretraining(tmp_path, cache):
    run(CONFIG, tmp_path / "one", dataset=random_text())
    following = Following()
    run(
        CONFIG.with_values({"seed": 1}), tmp_path / "two", dataset=random_text(), progress=following
    )
    assert following.told[0] == ("round", 3, 0)


def test_pretraining_is_kept_every_now_and_then_and_a_damaged_file_is_made_again(tmp_path, cache):
    dataset = random_text()

    class Killed(Following):
        def update(self, metrics):
            if metrics["round"] == 3:
                raise MemoryError

    with pytest.raises(MemoryError):
        run(CONFIG, tmp_path / "run", dataset=dataset, progress=Killed(), checkpoint_seconds=0)
    [unfinished] = cache.iterdir()
    experiment = build_experiment(CONFIG, dataset)
    engine = ThreadEngine(1)
    weights = starting_weights(experiment, engine)
    assert not unfinished.exists()
    for path in cache.iterdir():
        path.unlink()
    unfinished.write_bytes(b"damaged")
    assert (starting_weights(experiment, engine) == weights).all()
    engine.close()


def test_pretraining_that_diverges_says_that_it_was_pretraining(tmp_path, cache):
    wild = CONFIG.with_values({"pretraining.client_learning_rate": 1e30, "clipping.enabled": False})
    for _ in range(2):
        with pytest.raises(Diverged, match=r"^pre-training diverged at round \d"):
            run(wild, tmp_path / "run", dataset=random_text())


def test_the_command_line_says_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "show_progress", Following(stop=("pre-training round", 1)))
    words = [
        "so-init-softmax",
        "--rounds",
        2,
        "--set",
        "pretraining.rounds=3",
        "--set",
        "pretraining.seed=77",
    ]
    result = in_this_process("run", *words, "--out", tmp_path / "run")
    assert result.returncode == 130
    assert (
        result.stdout
        == "stopped after pre-training round 1 of 3; run the same command again to resume\n"
    )
    assert result.stderr == ""


def test_lines_of_progress_name_the_phase(capsys):
    with progress.show_progress("pre-training round", 40, 2) as shown:
        shown.update({"round": 4, "reward": 0.5, "running_reward": None})
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "resuming after pre-training round 2"
    assert said[1] == "pre-training round 4/40  reward 0.500  running -  10%"


def test_a_stop_while_several_runs_wait_for_their_start_keeps_what_there_is(
    tmp_path, cache, monkeypatch
):
    stopping = threading.Event()
    stopping.set()
    monkeypatch.setattr(many, "dataset_of", lambda job: random_text())
    assert prepare([Job(CONFIG, tmp_path / "a")], stopping) == {}
    assert len(list(cache.glob("*.unfinished.safetensors"))) == 1


def test_runs_that_a_stop_kept_from_beginning_are_interrupted_and_not_out_of_time(
    tmp_path, cache, monkeypatch
):
    monkeypatch.setattr(
        many, "prepare", lambda jobs, stopping, progress: signal.raise_signal(signal.SIGINT)
    )
    jobs = [Job(CONFIG.with_values({"seed": seed}), tmp_path / str(seed)) for seed in range(2)]
    assert [end.status for end in LocalRunner(2).run(jobs, deadline=1e12)] == ["interrupted"] * 2


def test_an_interrupted_command_is_one_line(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("fedbandit.presets.all_presets", interrupted)
    fails_with_one_line(in_this_process("presets"), "interrupted", code=130)
