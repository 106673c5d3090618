"""Files of other runs, or of another moment of the same run: the same bytes in the end, or one line and nothing lost."""

import json
import shutil

import numpy as np
import pytest
from builders import random_text
from command_line import fails_with_one_line, in_this_process
from exchanges import FILES, STAGES, Exchange, World, exchanges, generations
from small_runs import small_config

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.parts import trusting
from fedbandit.data import open_dataset
from fedbandit.data.importers.tables import TableOptions, import_table
from fedbandit.report.report import write_report
from fedbandit.results import Results
from fedbandit.runs.run import run
from fedbandit.studies.trained_models import load_scorer, newest_state

EVERY = [*exchanges(), *generations()]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("exchanges"))


@pytest.mark.parametrize("case", EVERY[:: len(EVERY) // 40], ids=str)
def test_a_file_of_another_run_or_moment_is_harmless_or_refused(world, case):
    world.tried(case)


@pytest.mark.slow
def test_every_exchange_of_every_file_is_harmless_or_refused(world):
    found = [world.tried(case) for case in EVERY]
    assert len(found) > 600
    assert found.count("refused") > 400
    assert found.count("same") > 100


def test_nothing_is_refused_where_nothing_was_exchanged(world):
    for mode in STAGES:
        files = FILES[-1:] if mode == "started" else FILES[:-1]
        assert world.tried(Exchange("base", files, "base", mode)) == "same"


@pytest.fixture
def two(tmp_path):
    """Two finished runs that differ in nothing but their seed, on the command line's own data."""
    for seed in (0, 1):
        run(small_config(seed=seed), tmp_path / str(seed), dataset=random_text())
    return tmp_path / "0", tmp_path / "1"


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "environment.json"])
def test_those_who_only_read_refuse_too(two, name):
    ours, theirs = two
    if name == "environment.json":  # which would say of another configuration what it was made from
        text = (ours / name).read_text().replace('"machine": "', '"machine": "other ')
        run_of_theirs = json.loads((theirs / name).read_text())["run"]
        text = text.replace(json.loads((ours / name).read_text())["run"], run_of_theirs)
        (ours / name).write_text(text)
    else:
        shutil.copy(theirs / name, ours / name)
    (problem,) = Results.open(ours).problems
    assert f"{name}: of another run" in problem
    with pytest.raises(DataError, match=f"{name}: of another run"):
        write_report([ours], ours.parent / "report.html")
    with pytest.raises(DataError, match=f"{name}: of another run"):
        run(small_config(), ours, dataset=random_text())


def test_a_model_of_another_run_is_not_evaluated(two):
    ours, theirs = two
    assert newest_state(ours).round == 12
    shutil.copytree(theirs / "checkpoints", ours / "checkpoints", dirs_exist_ok=True)
    with pytest.raises(DataError, match=r"round-000012\.safetensors: of another run"):
        newest_state(ours)


def test_a_changed_number_in_an_old_line_of_metrics_is_noticed(tmp_path):
    run(small_config(), tmp_path / "run", dataset=random_text(), until=8)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace('"reward": 0.', '"reward": 0.9')
    metrics.write_text("".join(lines))
    with pytest.raises(DataError, match=r"metrics\.jsonl: not the metrics that the checkpoint of"):
        run(small_config(), tmp_path / "run", dataset=random_text())


def test_the_command_refuses_in_one_line(tmp_path):
    command = ("run", "so-scratch-softmax", "--rounds", 2, "--set", "clients_per_round=4", "-q")
    for seed in (0, 1):
        out = ("--set", f"seed={seed}", "--out", tmp_path / str(seed))
        assert in_this_process(*command, *out).returncode == 0
    shutil.copy(tmp_path / "1" / "summary.json", tmp_path / "0" / "summary.json")
    refused = in_this_process(*command, "--set", "seed=0", "--out", tmp_path / "0")
    fails_with_one_line(refused, "summary.json: of another run", "remove it")


# What a run is made from


def test_a_data_set_is_known_by_its_contents_not_by_its_folder(tmp_path):
    table = tmp_path / "table.csv"
    rows = [f"u{user},w{user % 3} x{row},{'ab'[row % 2]}" for user in range(9) for row in range(6)]
    table.write_text("\n".join(["user,text,label", *rows]))
    options = TableOptions(client="user", text=("text",), labels="label", test_fraction=0.0)
    for name in ("one", "another"):
        import_table(table, tmp_path / name, options)
    one, another = (open_dataset(tmp_path / name) for name in ("one", "another"))
    assert (one.header.name, another.header.name) == ("one", "another")
    assert one.header.fingerprint == another.header.fingerprint
    short = {"rounds": 2, "clients_per_round": 2}
    run(small_config(**short, data__source=str(one.path)), tmp_path / "run", until=1)
    moved = run(small_config(**short, data__source=str(another.path)), tmp_path / "run")
    assert len(moved["reward"]) == 2
    table.write_text(table.read_text().replace("u0,w0 x0,a", "u0,w0 x0,b"))
    import_table(table, tmp_path / "other", options)
    with pytest.raises(ConfigError, match=r"data\.fingerprint is"):
        run(small_config(**short, data__source=str(tmp_path / "other")), tmp_path / "run")


def test_data_in_memory_without_a_fingerprint_are_told_apart(tmp_path):
    from dataclasses import replace

    def unnamed(seed):
        data = random_text(seed)
        return replace(data, header=replace(data.header, fingerprint=""))

    run(small_config(), tmp_path / "run", dataset=unnamed(0), until=4)
    with pytest.raises(ConfigError, match=r"data\.fingerprint is"):
        run(small_config(), tmp_path / "run", dataset=unnamed(1))


TOWERS = """
import numpy as np
import torch
from fedbandit.models import Model

def two_tower(data, actions="actions.npy"):
    items = torch.from_numpy(np.load(actions))
    shape = (data.shape[0], items.shape[1])

    def scores(params, x):
        return x @ params["user"] @ items.to(params["user"].dtype).T

    def init(seed):
        return {"user": np.random.default_rng(seed).normal(size=shape)}

    return Model(init, scores, files=lambda: [actions])
"""


@pytest.fixture
def towers(tmp_path, monkeypatch):
    """A folder with a model of a user's own that reads a file, and the data of the run."""
    from builders import random_images

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_towers.py").write_text(TOWERS)
    np.save("actions.npy", np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32))
    return random_images(shape=(5,))


def test_a_run_whose_part_reads_another_file_now_is_refused(towers, tmp_path):
    chosen = {"model__name": "my_towers:two_tower", "clients_per_round": 3}
    run(small_config(**chosen, rounds=4), "run", dataset=towers)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert list(environment["files"]) == ["actions.npy"]
    assert run(small_config(**chosen, rounds=6), "run", dataset=towers)["reward"].shape == (6,)
    actions = np.load("actions.npy")
    np.save("actions.npy", actions[::-1])
    for rounds in (6, 8):
        with pytest.raises(ConfigError, match=r"run: already finished; actions\.npy has changed"):
            run(small_config(**chosen, rounds=rounds), "run", dataset=towers)
    with (
        trusting("my_towers:two_tower"),
        pytest.raises(
            DataError, match=r"run: actions\.npy has changed since the model was trained"
        ),
    ):
        load_scorer("run", towers.header)
    np.save("actions.npy", actions)
    with trusting("my_towers:two_tower"):
        load_scorer("run", towers.header)
    assert run(small_config(**chosen, rounds=8), "run", dataset=towers)["reward"].shape == (8,)


def test_files_that_a_configuration_names_are_part_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prices.csv").write_text("1\n")
    config = small_config(data__files=["prices.csv"])
    run(config, "run", dataset=random_text(), until=4)
    (tmp_path / "prices.csv").write_text("2\n")
    with pytest.raises(ConfigError, match=r"run: prices\.csv has changed since"):
        run(config, "run", dataset=random_text())
    (tmp_path / "prices.csv").unlink()
    with pytest.raises(ConfigError, match=r"prices\.csv: cannot be read: No such file"):
        run(config, "run", dataset=random_text())
