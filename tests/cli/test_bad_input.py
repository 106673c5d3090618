"""Bad input gets one clear line and exit code 2, and nothing is lost or half-written."""

import json

import numpy as np
import pytest
from builders import add_example, random_images
from command_line import fails_with_one_line, fedbandit, in_this_process

from fedbandit import __version__
from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.core.ragged import Ragged
from fedbandit.data.writer import DatasetWriter
from fedbandit.runs.run import run


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--set", "polcy.beta=1"], ["polcy", "did you mean policy"]),
        (["--set", "policy.betta=1"], ["policy.betta", "did you mean beta"]),
        (["--set", "policy.beta=much"], ["policy.beta", "'much'"]),
        (["--set", "policy.beta=-1"], ["policy.beta", "positive"]),
        (["--set", "policy.name=softmin"], ["policy.name", "did you mean softmax"]),
        (["--set", "policy.name=no_such_module:Thing"], ["policy.name", "no_such_module"]),
        (["--set", "client.learning_rate=0"], ["client.learning_rate", "greater than 0"]),
        (["--set", "client.batch_size=1.5"], ["client.batch_size"]),
        (["--set", "server.optimizer=adamm"], ["server.optimizer", "did you mean adam"]),
        (["--set", "server.beta_1=2"], ["server.beta_1"]),
        (["--set", "clipping.quantile=1.5"], ["clipping.quantile"]),
        (["--set", "scenario=unknown"], ["scenario", "scratch"]),
        (["--set", "rounds"], ["--set rounds", "key=value"]),
        (["--set", "clients_per_round=99999"], ["clients_per_round", "99999"]),
        (["--set", "pretraining.clients=99999"], ["pretraining.clients", "99999"]),
        (["--set", "pretraining.seed=18446744073709551616"], ["pretraining.seed"]),
        (["--set", "clipping.rate=5000"], ["clipping.rate", "10"]),
        (["--set", "clipping.norm=1", "--set", "clipping.quantile=0.5"], ["clipping", "not both"]),
        (["--set", "threads=0"], ["threads: should be", "'auto'"]),
        (["--set", "data=topics"], ["data", "section"]),
        (["--set", "policy.since=2026-11-16"], ["policy", "since"]),
        (["--set", "policy.name=os:getcwd"], ["policy.name", "probabilities"]),
        (["--set", "objective.name=os:getcwd"], ["objective.name", "loss"]),
        (["--set", "scenario=builtins:repr"], ["scenario", "not a Scenario"]),
        (["--set", "server.optimizer=builtins:dict"], ["server"]),
        (["--set", "model.name=cnn"], ["model.name", "images"]),
        (["--set", "objective.name=cross-entropy"], ["objective.name", "[0, 1]"]),
        (["--rounds", "0"], ["rounds"]),
        (["--rounds", "many"], ["--rounds"]),
        (["--data", "/no/such/folder"], ["/no/such/folder", "topics"]),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_written(tmp_path, settings, words):
    result = in_this_process("run", "so-init-shift-softmax", "--out", tmp_path / "run", *settings)
    fails_with_one_line(result, *words)
    assert not (tmp_path / "run").exists()


def test_an_unknown_preset_names_the_nearest(tmp_path):
    result = in_this_process("run", "so-init-shift-sofmax", "--out", tmp_path / "run")
    fails_with_one_line(result, "so-init-shift-sofmax", "so-init-shift-softmax")


@pytest.mark.parametrize(
    ("begun", "words"),
    [
        (
            "emnist",
            [
                "emnist-scratch-POLICY",
                "emnist-init-shift-baseline",
                "emnist-dp-0.1",
                "POLICY is softmax, falcon",
            ],
        ),
        ("so-dp", ["so-dp-0.3", "so-dp-0.7"]),
    ],
)
def test_the_beginning_of_a_preset_tells_what_it_could_become(tmp_path, begun, words):
    fails_with_one_line(in_this_process("run", begun, "--out", tmp_path / "run"), *words)


def test_presets_are_listed_with_all_that_the_tables_print():
    lines = {line.split()[0]: line for line in in_this_process("presets").stdout.splitlines()}
    words = (
        "server 0.02",
        "client 2",
        "beta=0.1",
        "256 examples",
        "pre-training 100 rounds, server 0.05 client 0.05",
    )
    for word in words:
        assert word in lines["so-init-shift-softmax"]
    assert "pre-training" not in lines["so-scratch-softmax"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds = 'ten'", ["rounds", "integer"]),
        ("rounds = '2'", ["rounds", "integer"]),
        ("rounds = 2.0", ["rounds", "integer"]),
        ("deploy_every = true", ["deploy_every", "integer"]),
        ("training = 'no'", ["training", "boolean"]),
        ("[policy]\nname = 'softmax'\nbeta = '0.1'", ["policy.beta", "number"]),
        ("[policy]\nname = 'softmax'\nbeat = 1", ["policy.beat", "beta"]),
        ("rounds = ", ["wrong.toml"]),
        ("[client]\nlearning_rates = 1", ["client.learning_rates", "learning_rate"]),
        ("[clipping]\nnorm = 1\nquantile = 0.5", ["clipping", "not both"]),
    ],
)
def test_a_wrong_toml_file_is_refused_with_the_path_of_the_key(tmp_path, text, words):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    fails_with_one_line(in_this_process("run", path, "--out", tmp_path / "run"), *words)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_run_is_left_alone(tmp_path):
    out = tmp_path / "run"
    short = ("--rounds", 3, "--set", "pretraining.rounds=1", "-q")
    assert in_this_process("run", "so-init-shift-softmax", "--out", out, *short).returncode == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    result = in_this_process(
        "run", "so-init-shift-softmax", "--out", out, *short, "--set", "policy.beta=0.2"
    )
    fails_with_one_line(result, "policy.beta is 0.1 there and 0.2 here", "nothing was overwritten")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "holiday.jpg").write_text("precious")
    result = in_this_process("run", "so-scratch-softmax", "--out", tmp_path)
    fails_with_one_line(result, "holiday.jpg", "nothing was overwritten")
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_damaged_data_sets_are_refused(tmp_path):
    folder = tmp_path / "data"
    with DatasetWriter(folder, name="tiny", kind="dense", shape=(2,), actions=["a", "b"]) as writer:
        for client in "xyz":
            add_example(writer, client, np.ones(2), [0])
        writer.finish()

    def refused(*words):
        result = in_this_process(
            "run", "so-scratch-softmax", "--data", folder, "--out", tmp_path / "run"
        )
        fails_with_one_line(result, *words)

    refused("clients_per_round")  # 64 of 3 clients
    labels = folder / "train" / "label_ids.npy"
    whole = labels.read_bytes()
    labels.write_bytes(whole[:-6])
    refused("label_ids")
    labels.unlink()
    refused("label_ids", "missing")
    labels.write_bytes(whole)
    header = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps({**header, "version": 99}))
    refused("version 99")
    (folder / "header.json").write_text("{")
    refused("header.json")


def test_a_data_set_without_clients_cannot_be_made(tmp_path):
    with (
        DatasetWriter(
            tmp_path / "none", name="none", kind="dense", shape=(2,), actions=["a"]
        ) as writer,
        pytest.raises(Exception, match="no client"),
    ):
        writer.finish()
    assert not list(tmp_path.iterdir())


def test_not_a_number_in_features_is_refused_with_client_and_row(tmp_path):
    with (
        DatasetWriter(
            tmp_path / "nan", name="nan", kind="dense", shape=(2,), actions=["a"]
        ) as writer,
        pytest.raises(Exception, match=r"client bob, row 1\b.*finite"),
    ):
        writer.add_many(
            np.array(["amy", "bob"]),
            np.array([[1, 2], [np.nan, 1]], np.float32),
            Ragged.from_rows([[0], [0]]),
        )
    assert not list(tmp_path.iterdir())


def test_a_model_with_other_classes_is_refused(tmp_path, monkeypatch):
    (tmp_path / "seven_classes.py").write_text(
        "import numpy as np\n"
        "from fedbandit import Model\n"
        "my_model = Model(lambda seed: {'w': np.zeros((16, 7))}, lambda params, x: x.flatten(1) @ params['w'])\n"
    )
    monkeypatch.chdir(tmp_path)
    config = Config.build(
        {"scenario": "scratch", "clients_per_round": 4, "model": {"name": "seven_classes:my_model"}}
    )
    with pytest.raises(ConfigError, match="scores 7 actions, the data set has 6"):
        build_experiment(config, random_images())


def test_a_user_typing_nothing_or_nonsense_gets_help(tmp_path):
    assert "Usage" in fedbandit().stdout
    fails_with_one_line(in_this_process("rnu"), "rnu")
    fails_with_one_line(in_this_process("run", "so-scratch-softmax"), "--out")


@pytest.mark.parametrize("out", ["x" * 300, "/proc/foo"])
def test_a_place_where_nothing_can_be_written_is_one_line(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    fails_with_one_line(in_this_process("run", "so-scratch-softmax", "--out", out), out)


def test_a_run_in_which_nobody_took_part_has_no_reward_to_print(tmp_path):
    private = [
        "privacy.mechanism=dp-fedavg",
        "privacy.noise_multiplier=1",
        "privacy.delta=1e-4",
        "clipping.norm=1",
    ]
    private += ["privacy.sampling=poisson", "clients_per_round=1"]
    words = [word for setting in private for word in ("--set", setting)]
    result = in_this_process(
        "run", "so-scratch-softmax", "--out", tmp_path / "run", "--rounds", 1, "--seed", 2, *words
    )
    assert result.returncode == 0, result.stderr
    assert "running average reward - after 1 rounds" in result.stdout


def test_an_odd_note_of_a_failure_is_no_failure(tmp_path):
    config = Config.build({"scenario": "scratch", "rounds": 1, "clients_per_round": 4})
    run(config, tmp_path / "run", dataset=random_images())
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "error.json").write_text('{"why": "unknown"}')
    assert run(config, tmp_path / "run", dataset=random_images()).problems == ()


def test_the_version_is_told():
    result = in_this_process("--version")
    assert (result.returncode, result.stdout) == (0, f"fedbandit {__version__}\n")
