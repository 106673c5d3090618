"""What a run tells its trackers, built in and of one's own."""

import json
import sys
import time
import types

import pytest
from builders import random_text
from small_runs import small_config

from fedbandit.core.errors import ConfigError, FedbanditError, MissingExtra
from fedbandit.runs.reporting import scalars, tracker_named
from fedbandit.runs.run import run

MADE = []


class Collecting:
    """A tracker as a user would write one."""

    def __init__(self, folder, config):
        self.folder, self.config, self.rounds, self.closed = folder, config, [], False
        MADE.append(self)

    def update(self, metrics):
        self.rounds.append(metrics["round"])

    def close(self):
        self.closed = True


class Halfway:
    def __init__(self, folder, config):
        pass

    def update(self, metrics):
        pass


def test_a_tracker_of_ones_own_is_told_every_round_and_closed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_trackers", sys.modules[__name__])
    MADE.clear()
    run(
        small_config(),
        tmp_path / "run",
        dataset=random_text(),
        tracker=tracker_named("my_trackers:Collecting"),
    )
    [tracker] = MADE
    assert tracker.rounds == list(range(1, 13))
    assert tracker.closed
    assert tracker.folder == tmp_path / "run"


def test_wrong_trackers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_trackers", sys.modules[__name__])
    with pytest.raises(ConfigError, match="did you mean tensorboard"):
        tracker_named("tensorbord")
    with pytest.raises(ConfigError, match="no method close"):
        run(
            small_config(),
            tmp_path / "run",
            dataset=random_text(),
            tracker=tracker_named("my_trackers:Halfway"),
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own imports
def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(
        small_config(),
        tmp_path / "run",
        dataset=random_text(),
        tracker=tracker_named("tensorboard"),
    )
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("running_reward")] == list(range(1, 13))
    assert "client_reward/p50" in events.Tags()["scalars"]


def test_what_trackers_are_told_is_finite_numbers_by_name():
    metrics = {
        "round": 3,
        "reward": 0.5,
        "client_reward": {"p50": 1, "list": [1]},
        "gate": True,
        "lost": float("nan"),
    }
    assert scalars(metrics) == {"reward": 0.5, "client_reward/p50": 1.0}


class _FakeRun:
    def __init__(self, calls):
        self.calls = calls

    def log(self, values, step):
        self.calls.append((step, values["running_reward"]))

    def finish(self):
        self.calls.append("finished")


def test_weights_and_biases_is_offline_and_keeps_its_id(tmp_path, monkeypatch):
    """As the library is called, where it is not installed."""
    begun, calls = [], []

    def init(**options):
        begun.append(options)
        return _FakeRun(calls)

    monkeypatch.setitem(
        sys.modules, "wandb", types.SimpleNamespace(init=init, Settings=lambda **options: options)
    )
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for rounds in (2, 3):
        run(
            small_config(rounds=rounds),
            tmp_path / "mine" / "run",
            dataset=random_text(),
            tracker="wandb",
        )
    assert [step for step, _ in (call for call in calls if call != "finished")] == [1, 2, 3]
    assert calls.count("finished") == 2
    assert {one["mode"] for one in begun} == {"offline"}
    assert len({one["id"] for one in begun}) == 1
    assert begun[0]["name"] == "mine/run"
    assert begun[0]["config"]["policy"]["beta"] == 0.1


class _FakeMlflow(types.SimpleNamespace):
    """The part of MLflow's client that is used."""

    class Refused(Exception):
        pass

    def __init__(self, refusing=False):
        self.calls, self.refusing = [], refusing
        super().__init__(
            MlflowClient=self._client,
            exceptions=types.SimpleNamespace(MlflowException=self.Refused),
            entities=types.SimpleNamespace(
                Metric=lambda key, value, timestamp, step: (key, value, step),
                Param=lambda key, value: (key, value),
            ),
        )

    def _client(self):
        if self.refusing:
            raise self.Refused("no server there\nand more")

        def told(name, result=None):
            return lambda *given, **named: self.calls.append((name, given, named)) or result

        created = types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))
        return types.SimpleNamespace(
            get_experiment_by_name=told("find"), create_experiment=told("experiment", "7"),
            create_run=told("create", created), log_batch=told("log"), update_run=told("update"),
            set_terminated=told("end"),
        )  # fmt: skip


def test_mlflow_has_the_settings_and_a_run_that_goes_on(tmp_path, monkeypatch):
    """As the library is called, where it is not installed."""
    fake = _FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    run(small_config(rounds=3), tmp_path / "run", dataset=random_text(), tracker="mlflow", until=2)
    run(small_config(rounds=3), tmp_path / "run", dataset=random_text(), tracker="mlflow")
    assert [name for name, _, _ in fake.calls].count("create") == 1
    logged = [named for name, _, named in fake.calls if name == "log"]
    assert ("policy.beta", "0.1") in logged[0]["params"]
    steps = [
        step
        for named in logged
        for key, _, step in named.get("metrics", ())
        if key == "running_reward"
    ]
    assert steps == [1, 2, 3]
    assert [given for name, given, _ in fake.calls if name == "end"] == [
        ("abc", "KILLED"),
        ("abc", "FINISHED"),
    ]
    assert json.loads((tmp_path / "run" / "trackers.json").read_text()) == {"mlflow": "abc"}


def test_a_tracker_that_refuses_is_one_line_and_one_that_is_missing_names_its_extra(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "mlflow", _FakeMlflow(refusing=True))
    with pytest.raises(FedbanditError, match=r"^--tracker mlflow: no server there$"):
        run(small_config(), tmp_path / "run", dataset=random_text(), tracker="mlflow")

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name in ("mlflow", "wandb"):
                raise ModuleNotFoundError(name=name)

    for name in ("mlflow", "wandb"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
        with pytest.raises(MissingExtra, match=rf"pip install 'fedbandit\[{name}\]'"):
            run(small_config(), tmp_path / name, dataset=random_text(), tracker=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_reads_what_was_written(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    pytest.importorskip("sqlalchemy", reason="the extra `mlflow` is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    for rounds in (4, 7):
        run(small_config(rounds=rounds), tmp_path / "run", dataset=random_text(), tracker="mlflow")
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("fedbandit").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["policy.beta"] == "0.1"
    history = client.get_metric_history(found.info.run_id, "client_reward/p50")
    assert [one.step for one in history] == list(range(1, 8))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Weights & Biases' own
def test_weights_and_biases_writes_a_run_that_can_be_sent_later(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run(small_config(rounds=4), tmp_path / "run", dataset=random_text(), tracker="wandb")
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    ends = time.monotonic() + 60
    while b"running_reward" not in kept.read_bytes():  # its own process writes it
        assert time.monotonic() < ends
        time.sleep(0.05)
