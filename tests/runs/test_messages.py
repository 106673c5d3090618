"""Messages name what the user gave, say what is wrong with it, and name the next step."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from builders import add_example, random_text
from command_line import fails_with_one_line, in_this_process
from small_runs import small_config

from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.data.importers.arrays import ArrayOptions
from fedbandit.data.importers.stackexchange import StackExchangeOptions, StackOverflowOptions
from fedbandit.data.importers.tables import LoggedOptions, TableOptions
from fedbandit.data.writer import DatasetWriter
from fedbandit.runs.run import execute


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a CSV file, an empty folder, a run folder's model file, and a small data set of 12 clients."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.csv").write_text(
        "user,title,tags\nann,how to sort a list,python\n", encoding="utf-8"
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with DatasetWriter(
        tmp_path / "small", name="small", kind="dense", shape=(2,), actions=["a", "b"]
    ) as writer:
        for client in range(12):
            add_example(writer, f"client-{client:02d}", np.ones(2), [0])
        writer.finish()
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["run", "so-scratch-softmax", "--data", "questions.csv", "-o", "out"],
        ["data", "info", "questions.csv"],
        ["train-offline", "questions.csv", "-o", "m.safetensors"],
    ],
)
def test_a_table_in_place_of_a_data_set_leads_to_the_import(here, words):
    result = in_this_process(*words)
    how = "fedbandit data import table questions.csv --client COLUMN --labels COLUMN --out FOLDER"
    fails_with_one_line(result, "questions.csv", "is a file, not a data set folder", how)
    assert "Errno" not in result.stderr


def test_an_unreadable_place_is_named_without_temporary_names(here):
    result = in_this_process("report", "folder", "-o", "folder")
    assert ".tmp" not in result.stderr
    with_runs = in_this_process("run", "so-scratch-softmax", "--rounds", 1, "-o", "runs/one", "-q")
    assert with_runs.returncode == 0, with_runs.stderr
    fails_with_one_line(
        in_this_process("report", "runs", "-o", "folder"), "error: folder: is a folder"
    )
    assert list((here / "folder").iterdir()) == []
    fails_with_one_line(
        in_this_process("report", "runs", "-o", "/proc/x.html"), "error: /proc/x.html: "
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data", "import", "table", "folder", "-o", "x", "--client", "a", "--labels", "b", "--text", "c"],
         "folder: is a folder, not a .csv, .tsv or .parquet file"),
        (["data", "import", "arrays", "folder", "-o", "x", "--features", "a", "--labels", "b", "--clients", "c"],
         "folder: is a folder, not a .npz file"),
        (["run", "folder", "-o", "x"], "folder: is a folder, not a preset or a TOML file"),
        (["report", "questions.csv"], "questions.csv: is a file, not a folder with runs"),
        (["watch", "questions.csv"], "questions.csv: is a file, not a folder with runs"),
        (["report", "nowhere"], "nowhere: no such folder"),
    ],
)  # fmt: skip
def test_a_file_for_a_folder_and_a_folder_for_a_file_are_called_that(here, words, said):
    fails_with_one_line(in_this_process(*words), said)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy.bta": 3}, "policy.bta: unknown key; did you mean beta"),
        ({"policy.name": "falcon", "policy.beta": 3}, "policy.beta: unknown key"),
        ({"policy.name": "sofmax"}, "policy.name: unknown name 'sofmax'; did you mean softmax"),
        ({"objective.wieght": 1}, "objective.wieght: unknown key"),
        ({"objective.name": "regresion"}, "objective.name: unknown name"),
        ({"model.name": "mlp", "model.hiden": 5}, "model.hiden: unknown key; did you mean hidden"),
        ({"server.momentun": 0.9}, "server.momentun: unknown key"),
        (
            {"server.optimizer": "adamm"},
            "server.optimizer: unknown name 'adamm'; did you mean adam",
        ),
        ({"model.freez": ["w"]}, r"model.freez: unknown key; did you mean freeze\?"),
        ({"model.freeze": "w"}, r"model.freeze: should be a list, such as \['w'\], not 'w'"),
        ({"algorithm.mu": 0.1}, "algorithm.mu: unknown key of fedavg; fedprox takes it"),
        ({"compression.bits": 4}, "compression.bits: unknown key of none; quantize takes it"),
    ],
)
def test_a_parameter_that_a_built_in_part_does_not_have_is_refused_when_it_is_set(settings, words):
    with pytest.raises(ConfigError, match=words):
        Config().with_values(settings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "rounds = 3\n\n[model]\nfreez = ['x']\n",
            "mine.toml, line 4: model.freez: unknown key; did you mean freeze?",
        ),
        (
            "rounds = 3\npolicy = {name = 'softmax', bta = 1}\n",
            "mine.toml, line 2: policy.bta: unknown key; did you mean",
        ),
        (
            "[client]\nlearning_rate = 'x'\n",
            "mine.toml, line 2: client.learning_rate: should be a valid number, not 'x'",
        ),
        (
            "client.learning_rate = 0\n",
            "mine.toml, line 1: client.learning_rate: should be greater than 0, not 0",
        ),
        ("roundz = 3\n", "mine.toml, line 1: roundz: unknown key; did you mean rounds?"),
        ("[clipping]\nnorm = 1.0\nquantile = 0.5\n", "mine.toml, line 1: clipping: "),
        (
            "rounds = 3\n[policy\n",
            "mine.toml: Expected ']' at the end of a table declaration (at line 2, column 8)",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_refused_with_its_line(here, text, said):
    (here / "mine.toml").write_text(text, encoding="utf-8")
    fails_with_one_line(in_this_process("run", "mine.toml", "-o", "out"), said)
    assert not (here / "out").exists()


def test_parameters_of_a_users_own_part_are_left_to_that_part():
    settings = {"policy.name": "my_module:MyPolicy", "policy.anything": 3}
    assert Config().with_values(settings).policy.parameters == {"anything": 3}


@pytest.mark.parametrize("number", [1, 0])
@pytest.mark.parametrize(
    "make",
    [
        lambda actions: TableOptions(client="a", labels="b", text=["c"], actions=actions),
        lambda actions: LoggedOptions(
            client="a", action="b", reward="c", propensity="d", text=["e"], actions=actions
        ),
        lambda actions: ArrayOptions(features="a", labels="b", clients="c", actions=actions),
        lambda actions: StackExchangeOptions(actions=actions),
        lambda actions: StackOverflowOptions(actions=actions),
    ],
)  # fmt: skip
def test_a_bandit_has_at_least_two_actions(make, number):
    with pytest.raises(ConfigError, match=f"actions: must be at least 2, got {number}"):
        make(number)


def test_train_offline_overwrites_a_model_only_when_asked(here):
    log = here / "log.csv"
    rows = "\n".join(f"u{i % 4},{i % 2},{i % 2},0.5,1.0" for i in range(16))
    log.write_text(f"user,action,reward,propensity,x\n{rows}\n", encoding="utf-8")
    columns = [
        "--client",
        "user",
        "--action",
        "action",
        "--reward",
        "reward",
        "--propensity",
        "propensity",
    ]
    done = in_this_process(
        "data", "import", "logged", log, "-o", "logged", *columns, "--features", "x"
    )
    assert done.returncode == 0, done.stderr
    command = ["train-offline", "logged", "-o", "model.safetensors", "--rounds", 1]
    fails_with_one_line(in_this_process(*command), "model.safetensors: already exists", "--force")
    assert (here / "model.safetensors").read_bytes() == b"precious"
    forced = in_this_process(*command, "--force")
    assert forced.returncode == 0, forced.stderr
    assert (here / "model.safetensors").read_bytes() != b"precious"


def test_a_server_looks_at_its_file_before_it_asks_for_certificates(here):
    fails_with_one_line(
        in_this_process("deploy", "server", "missing.toml"), "missing.toml: no such file"
    )
    (here / "wrong.toml").write_text("[deployment]\nstte = 'x'\n", encoding="utf-8")
    fails_with_one_line(
        in_this_process("deploy", "server", "wrong.toml"),
        "wrong.toml: deployment.state: missing",
    )


def test_a_finished_run_says_so_and_what_to_do(here):
    command = ["run", "so-scratch-softmax", "--rounds", 1, "-o", "run", "-q"]
    first = in_this_process(*command)
    assert "already finished" not in first.stdout
    again = in_this_process(*command)
    assert again.returncode == 0
    assert again.stdout.startswith(
        "already finished; more --rounds extend it; for another run use another folder\n"
    )
    assert again.stdout.endswith(first.stdout)


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_seed_has_no_spread(here, seeds):
    words = [
        "figure",
        "fig2a",
        "--scale",
        "0.002",
        "--seeds",
        seeds,
        "--workers",
        1,
        "-o",
        "figures",
    ]
    words += ["--set", "clients_per_round=4", "--set", "client.max_examples=4"]
    made = in_this_process(*words)
    assert made.returncode == 0, made.stderr
    assert "nan" not in made.stdout
    assert (" ± " in made.stdout.split("what the paper says")[1].split(":", 1)[1]) == (seeds > 1)


def test_one_member_and_one_candidate_are_singular(here):
    (here / "one.toml").write_text(
        'start = "so-scratch-softmax"\nseeds = 2\nset = {rounds = 2, clients_per_round = 4}\n',
        encoding="utf-8",
    )
    swept = in_this_process("sweep", "one.toml", "-o", "sweep", "--workers", 1)
    assert swept.returncode == 0, swept.stderr
    assert "1 member x 2 seeds, up to 2 rounds" in swept.stderr
    assert "1 members" not in swept.stdout + swept.stderr
    assert "1 candidates" not in swept.stdout + swept.stderr


@pytest.mark.parametrize(
    "key", ["client.learning_rate", "server.learning_rate", "pretraining.client_learning_rate"]
)
def test_a_rate_beyond_the_number_type_is_refused(here, key):
    result = in_this_process("run", "so-scratch-softmax", "-o", "run", "--set", f"{key}=1e300")
    fails_with_one_line(result, f"error: {key}: 1e+300 is too large for float32")
    assert Config().with_values({key: 1e300, "dtype": "float64"}).dtype == "float64"


def test_a_rate_that_diverges_gives_one_line_and_no_warning(here):
    words = [
        "run",
        "so-scratch-softmax",
        "--rounds",
        2,
        "-o",
        "run",
        "-q",
        "--set",
        "client.learning_rate=1e30",
    ]
    fails_with_one_line(in_this_process(*words), "diverged at round 1", code=1)
    assert json.loads((here / "run" / "error.json").read_text())["kind"] == "Diverged"


def test_a_cache_that_cannot_be_made_is_named_with_what_to_set(tmp_path):
    home = tmp_path / "home"
    home.write_text("a file")
    environment = {
        k: v for k, v in os.environ.items() if k not in ("FEDBANDIT_CACHE", "XDG_CACHE_HOME")
    }
    words = ["run", "so-scratch-softmax", "-o", str(tmp_path / "out"), "--rounds", "1", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "fedbandit", *words],
        capture_output=True,
        text=True,
        env={**environment, "HOME": str(home)},
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "FEDBANDIT_CACHE" in done.stderr


def test_a_file_system_without_locks_is_not_called_busy(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fedbandit.runs.folder.fcntl.flock", refuses)
    with pytest.raises(ConfigError, match="gives no locks") as said:
        execute(small_config(), tmp_path / "run", dataset=random_text())
    assert "another process" not in str(said.value)


def test_a_numeric_table_is_trained_without_a_warning(tmp_path):
    rows = ["user,a,b,label", *(f"u{i % 8},{i % 5}.5,{i % 3},{'xyz'[i % 3]}" for i in range(80))]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    table = str(tmp_path / "table.csv")
    words = ["data", "import", "table", table, "--client", "user", "--labels", "label"]
    imported = subprocess.run(
        [sys.executable, "-m", "fedbandit", *words, "-o", str(tmp_path / "data")],
        capture_output=True,
        text=True,
    )
    assert imported.returncode == 0, imported.stderr
    for model in ("linear", "mlp"):
        words = ["run", "so-scratch-softmax", "--data", str(tmp_path / "data"), "--rounds", "2"]
        words += ["--set", "clients_per_round=2", "--set", f"model.name={model}", "--quiet"]
        done = subprocess.run(
            [sys.executable, "-m", "fedbandit", *words, "-o", str(tmp_path / model)],
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
