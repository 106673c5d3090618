"""`sweep` and `evaluate` from Python: what they take, what they return, and what they refuse."""

import re

import numpy as np
import pandas as pd
import pytest
from builders import random_images

from fedbandit import Results, evaluate, preset, run, sweep
from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.data.importers.tables import TableOptions, import_table
from fedbandit.ope import Constant, Uniform
from fedbandit.policies import EpsilonGreedy
from fedbandit.studies.tuning import collect_logs


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A small data set on disk: forty visitors whose searches name the department."""
    folder = tmp_path_factory.mktemp("shop")
    rng = np.random.default_rng(3)
    words = {"garden": "hose rake seed", "kitchen": "pan knife bowl", "bath": "towel soap tap"}
    lines = ["visitor,search,department"]
    for visitor in range(40):
        for _ in range(10):
            department = rng.choice(list(words))
            lines.append(
                f"v{visitor:02d},{' '.join(rng.choice(words[department].split(), 2))},{department}"
            )
    (folder / "table.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = TableOptions(client="visitor", labels="department", text=["search"])
    import_table(folder / "table.csv", folder / "shop", options)
    return folder / "shop"


@pytest.fixture(scope="module")
def small(shop):
    return preset("so-scratch-softmax").with_values(
        {"rounds": 4, "deploy_every": 2, "clients_per_round": 8, "data.source": str(shop)}
    )


# --- sweeps ---


def test_a_sweep_has_every_value_with_every_seed(small, tmp_path):
    # Adam takes the same steps for both client rates, and a tie has no winner.
    small = small.with_values({"server.optimizer": "sgd", "server.learning_rate": 2.0})
    spec = {
        "start": small,
        "grid": {"policy.beta": [0.05, 0.5], "client.learning_rate": [0.2, 1.0]},
        "seeds": [3, 4],
    }
    results = sweep(spec, tmp_path / "out")
    assert results["reward"].shape == (8, 4)
    frame = results.to_pandas()
    found = set(
        frame[["policy.beta", "client.learning_rate", "seed"]].itertuples(index=False, name=None)
    )
    assert found == {
        (beta, rate, seed) for beta in (0.05, 0.5) for rate in (0.2, 1.0) for seed in (3, 4)
    }
    assert (tmp_path / "out" / "winner.toml").exists()
    assert len(results.summary().rows) == 4
    alone = run(
        small.with_values({"policy.beta": 0.5, "client.learning_rate": 1.0, "seed": 4}),
        tmp_path / "alone",
    )
    member = results.where({"policy.beta": 0.5, "client.learning_rate": 1.0, "seed": 4})
    np.testing.assert_array_equal(member["reward"], alone["reward"])
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("summary.json")}
    wider = sweep(
        {**spec, "grid": {**spec["grid"], "policy.beta": [0.05, 0.5, 1.0]}}, tmp_path / "out"
    )
    assert len(wider) == 12
    assert all(
        path.stat().st_mtime_ns == time for path, time in written.items()
    )  # nothing is run twice


def test_a_file_and_a_dictionary_are_the_same_sweep(small, tmp_path, capsys):
    (tmp_path / "small.toml").write_text(small.to_toml(), encoding="utf-8")
    start = str(tmp_path / "small.toml")
    (tmp_path / "sweep.toml").write_text(
        f'start = "{start}"\nseeds = 2\ngrid."policy.beta" = [0.1, 0.2]\n', encoding="utf-8"
    )
    of_file = sweep(tmp_path / "sweep.toml", tmp_path / "file")
    of_dict = sweep(
        {"start": start, "seeds": 2, "grid": {"policy.beta": [0.1, 0.2]}},
        tmp_path / "dict",
        progress=True,
    )
    assert [record.name for record in of_file.runs] == [record.name for record in of_dict.runs]
    np.testing.assert_array_equal(of_file["reward"], of_dict["reward"])
    assert "2 members x 2 seeds" in capsys.readouterr().out


def test_configurations_to_start_from_may_be_of_one_policy(small, tmp_path):
    starts = [
        small,
        small.with_values({"client.learning_rate": 0.7}),
        small.with_values({"policy.name": "greedy"}),
    ]
    results = sweep({"start": starts}, tmp_path / "out")
    names = {re.sub(r"-[0-9a-f]{10}/.*", "", record.name) for record in results.runs}
    assert names == {"softmax", "softmax-2", "greedy"}
    with pytest.raises(ConfigError, match=r"start: .*names one twice"):
        sweep({"start": [small, small]}, tmp_path / "twice")


def test_runs_that_diverge_are_in_the_results_and_said(small, tmp_path):
    wild = {
        "start": small,
        "set": {"clipping.enabled": False},
        "grid": {"client.learning_rate": [0.2, 1e30]},
    }
    results = sweep(wild, tmp_path / "out")
    assert len(results) == 2
    (problem,) = results.problems
    assert "failed after" in problem
    assert "diverged at round" in problem


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"grid": {}}, "start: field required"),
        ({"start": "so-scratch-softmax", "gird": {}}, "gird: unknown key; did you mean grid"),
        ({"start": "so-scratch-sofmax"}, "so-scratch-sofmax: no such preset"),
        ({"start": 3}, "start: input should be a valid list"),
    ],
)
def test_a_wrong_sweep_is_refused(tmp_path, spec, message):
    with pytest.raises(ConfigError, match=message):
        sweep(spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- evaluation ---


@pytest.fixture(scope="module")
def table():
    """Three actions that pay 0.2, 0.5 and 0.8, logged by a policy that prefers the first."""
    rng = np.random.default_rng(0)
    logging = np.array([0.6, 0.3, 0.1])
    action = rng.choice(3, 6000, p=logging)
    columns = {
        "user": np.arange(6000) // 20,
        "action": np.array(["a", "b", "c"])[action],
        "reward": (rng.random(6000) < np.array([0.2, 0.5, 0.8])[action]).astype(float),
        "propensity": logging[action],
        "wanted": np.array([0.1, 0.1, 0.8])[action],
    }
    return pd.DataFrame(columns)


def test_policies_are_values_names_or_names_with_parameters(table):
    constant = evaluate(table, {"name": "constant", "action": "c"}, client="user")
    assert constant["ips"].interval.contains(0.8)
    assert evaluate(table, Constant(2), client="user").estimates == constant.estimates
    uniform = evaluate(table, client="user")
    assert uniform["snips"].interval.contains(0.5)
    assert evaluate(table, "uniform", client="user").estimates == uniform.estimates
    assert evaluate(table, Uniform(), client="user").estimates == uniform.estimates
    wanted = evaluate(table, target="wanted", client="user", estimators=["snips"])
    assert list(wanted.estimates) == ["snips"]
    assert wanted["snips"].interval.contains(0.1 * 0.2 + 0.1 * 0.5 + 0.8 * 0.8)


def test_tables_in_memory_and_in_files_say_the_same(table, tmp_path):
    expected = evaluate(table, client="user").estimates
    assert evaluate(table.to_dict("list"), client="user").estimates == expected
    for name in ("log.csv", "log.parquet"):
        write = table.to_csv if name.endswith("csv") else table.to_parquet
        write(tmp_path / name)
        assert evaluate(tmp_path / name, client="user").estimates == expected
        assert evaluate(str(tmp_path / name), client="user").estimates == expected
    renamed = table.rename(columns={"action": "shown", "propensity": "p"})
    assert evaluate(renamed, client="user", action="shown", propensity="p").estimates == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "epsilon-greedy"}, "a model's policy needs contexts"),
        ({"policy": EpsilonGreedy(0.1)}, "a model's policy needs contexts"),
        ({"policy": {"action": "c"}}, "policy: a policy with parameters needs a name"),
        ({"policy": {"name": "constant", "action": "d"}}, "no action called 'd'"),
        ({"clients": "user"}, "clients: unknown option; did you mean client"),
        ({"model": Results(())}, "model: take the results of one run"),
        (
            {"target": "wanted", "policy": Uniform()},
            "policy: the column wanted says what the policy does",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_evaluated_is_refused(table, given, message):
    with pytest.raises(ConfigError, match=message):
        evaluate(table, **given)


def test_what_is_no_table_is_refused(table):
    with pytest.raises(DataError, match=r"^logs: no column 'propensity'"):
        evaluate(table.drop(columns="propensity"))
    with pytest.raises(DataError, match="logs: no table of decisions"):
        evaluate(3)
    with pytest.raises(DataError, match=r"nowhere\.csv: no such file"):
        evaluate("nowhere.csv")


def test_a_model_comes_from_results_a_folder_or_a_file(small, tmp_path):
    dataset = random_images(clients=30)
    config = Config.build(
        {**small.model_dump(), "client": {"learning_rate": 0.5}, "policy": {"name": "greedy"}}
    )
    trained = run(config.with_values({"rounds": 20}), tmp_path / "run", dataset=dataset)
    exploring = config.with_values({"policy.name": "epsilon-greedy", "policy.epsilon": 1.0})
    experiment = build_experiment(exploring, dataset)
    logs = collect_logs(experiment, experiment.bandit.start(experiment.initial_weights()), 2)
    found = evaluate(logs, EpsilonGreedy(0.1), model=trained)
    assert found["snips"].value > found.logged_reward  # what was trained is better than chance
    assert evaluate(logs, EpsilonGreedy(0.1), model=tmp_path / "run").estimates == found.estimates
    named = {"name": "epsilon-greedy", "epsilon": 0.1}
    assert evaluate(logs, named, model=str(tmp_path / "run")).estimates == found.estimates
    with pytest.raises(ConfigError, match="EpsilonGreedy needs a model's scores"):
        evaluate(logs, EpsilonGreedy(0.1))
    text = str(found)
    assert text.splitlines()[0].startswith(f"{found['ips'].events} events of")
    assert "warning: " in text or "note: " in text
