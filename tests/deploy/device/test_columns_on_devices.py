"""Contexts by column on a device: the same numbers as in the import, and models that carry their encoder."""

import json
from dataclasses import replace
from datetime import date, datetime

import numpy as np
import pytest
from messy_tables import write_tickets

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.data import open_dataset
from fedbandit.data.encoder import Column
from fedbandit.data.importers.tables import TableOptions, import_table
from fedbandit.deploy import Agent, DeviceModel
from fedbandit.deploy.server.deployment import build_deployment
from fedbandit.federated.learners.linear import SparseLinearLearner
from fedbandit.studies.trained_models import load_scorer

CONFIG = {"scenario": "scratch", "rounds": 2, "clients_per_round": 8, "policy": {"name": "greedy"}}


@pytest.fixture(scope="module")
def tickets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tickets")
    options = TableOptions(client="Kunde", labels="Queue", test_fraction=0)
    import_table(write_tickets(folder / "t.csv", rows=120), folder / "tickets", options)
    return open_dataset(folder / "tickets")


@pytest.fixture(scope="module")
def model(tickets):
    experiment = build_experiment(
        Config.build({**CONFIG, "data": {"source": str(tickets.path)}}), tickets
    )
    assert isinstance(
        experiment.bandit.work.learner, SparseLinearLearner
    )  # text and numbers on the compiled kernel
    weights = np.random.default_rng(0).normal(size=experiment.layout.size).astype(np.float32)
    return DeviceModel.of_experiment(experiment, weights, version=1)


def rows_of(tickets):
    """The file's own rows as an app has them, in the order of the data set."""
    lines = (tickets.path.parent / "t.csv").read_text(encoding="latin-1").splitlines()[1:]
    cells = [line.split(";") for line in lines]
    kept = sorted(
        (row for row in cells if row[7]), key=lambda row: row[1]
    )  # stable: a client's rows keep their order
    for _, _, subject, priority, created, minutes, branch, _, second in kept:
        yield {
            "Betreff": subject.strip('"'),
            "Priorität": priority or None,
            "erstellt": datetime.strptime(created, "%d.%m.%Y %H:%M"),
            "Minuten": None if minutes == "-" else float(minutes.replace(",", ".")),
            "Filiale": branch,
            "Queue 2": second or None,
        }


def test_an_agent_encodes_columns_as_the_import_did(tickets, model, tmp_path):
    with Agent(tmp_path) as agent:
        agent.install(DeviceModel.from_bytes(model.to_bytes()))
        for row in rows_of(tickets):
            agent.reward(agent.choose(row).event_id, 1.0)
        found = agent.events().events.contexts.shared
    expected = tickets.train.shared(np.arange(tickets.train.num_examples))
    np.testing.assert_array_equal(found.offsets, expected.offsets)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.values, expected.values)


@pytest.mark.parametrize(
    ("context", "match"),
    [
        ("a text", "context: expected its columns by name, got str"),
        ({"Betref": "x"}, "context: no column 'Betref'; did you mean Betreff"),
        ({"Betreff": 3}, "context: Betreff is a text, got int"),
        ({"Minuten": "3"}, "context: Minuten is a number, got str"),
        ({"Minuten": float("inf")}, "context: Minuten is not finite"),
        ({"Minuten": 10**400}, "context: Minuten is not finite"),
        ({"erstellt": "yesterday"}, "context: erstellt is a date such as 2024-05-31"),
        ({"Priorität": 1.5}, "context: Priorität is a category, got float"),
    ],
)
def test_contexts_that_do_not_fit_are_refused(model, tmp_path, context, match):
    with Agent(tmp_path) as agent:
        agent.install(model)
        with pytest.raises(ValueError, match=match):
            agent.choose(context)


def test_a_value_nobody_has_seen_and_one_that_is_left_out_are_fine(model, tmp_path):
    with Agent(tmp_path) as agent:
        agent.install(model)
        assert agent.choose({"Priorität": "never heard of", "erstellt": "2024-05-31T08:00"}).logged
        assert agent.choose({}).logged


def test_what_an_app_has_is_read_as_the_import_reads_it():
    category = Column(name="x", kind="category", values=("3", "true", "vip"), missing=True)
    given = [True, 3, 3.0, np.int64(3), " vip ", None, float("nan"), "n/a"]
    assert [category.cell(value) for value in given] == ["true", "3", "3", "3", "vip", "", "", ""]
    flag = Column(name="x", kind="flag")
    assert [flag.cell(value) for value in (True, 0, np.bool_(False))] == [1.0, 0.0, 0.0]
    day = Column(name="x", kind="date", parts=("weekday",))
    assert (
        day.cell(date(1970, 1, 2))
        == day.cell("1970-01-02")
        == day.cell("1970-01-02T00:00+09:00")
        == 86_400
    )


def damaged(model, change):
    from safetensors.numpy import load, save

    payload = model.to_bytes()
    header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
    facts = json.loads(header["__metadata__"]["model"])
    change(facts)
    return save(load(payload), metadata={"model": json.dumps(facts)})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda facts: facts["encoder"].update(words=3), "its columns and words do not fit"),
        (lambda facts: facts["encoder"]["columns"].pop(), "its columns and words do not fit"),
        (
            lambda facts: facts["encoder"]["columns"][2].update(deviation=0.0),
            r"columns\.2\.\w+: input should be",
        ),
        (
            lambda facts: facts["encoder"]["columns"][2].update(mean="1"),
            r"columns\.2\.mean: input should be a valid number",
        ),
        (
            lambda facts: facts["encoder"]["columns"][2].update(mean=10**400),
            r"columns\.2\.\w+: input should be",
        ),
        (
            lambda facts: facts["encoder"]["columns"][0].update(kind="colour"),
            "kind: input should be 'number', .*, not 'colour'",
        ),
        (
            lambda facts: facts["encoder"]["columns"][0].update(values=["a", "a"]),
            "values or parts are named twice",
        ),
        (
            lambda facts: facts["encoder"]["columns"][1].update(parts=["minute"]),
            r"parts\.0: input should be",
        ),
        (
            lambda facts: facts["encoder"]["columns"][0].update(name="Minuten"),
            "columns are named twice",
        ),
        (lambda facts: facts.update(encoder=[]), "encoder: input should be"),
    ],
)
def test_a_strangers_encoder_is_checked(model, change, match):
    with pytest.raises(DataError, match=match) as caught:
        DeviceModel.from_bytes(damaged(model, change))
    assert "\n" not in str(caught.value)


def test_a_model_does_not_score_other_columns_of_the_same_number(tickets, model, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(model.to_bytes())
    assert load_scorer(path, tickets.header)
    columns = [replace(column, mean=column.mean + 1) for column in tickets.header.encoder.columns]
    other = replace(tickets.header, encoder=replace(tickets.header.encoder, columns=tuple(columns)))
    with pytest.raises(
        DataError, match=r"made for other columns than tickets has; import the data with --like"
    ):
        load_scorer(path, other)


def test_a_deployment_takes_the_columns_of_a_data_set(tickets, model):
    values = {
        "policy": {"name": "greedy"},
        "clipping": {"norm": 1.0},
        "deployment": {
            "state": "state", "actions": list(tickets.header.actions), "vocabulary": "vocabulary.txt",
            "encoder": "header.json",
        },
    }  # fmt: skip
    deployment = build_deployment(values, tickets.path)
    assert deployment.space == model.space  # its devices' logs and models mean the same
    with pytest.raises(ConfigError, match=r"deployment\.encoder: goes with a vocabulary"):
        build_deployment(
            {**values, "deployment": {**values["deployment"], "vocabulary": None}}, tickets.path
        )
    wrong = {**values, "deployment": {**values["deployment"], "encoder": "checksums.json"}}
    with pytest.raises(ConfigError, match="not the header of a table's data"):
        build_deployment(wrong, tickets.path)
