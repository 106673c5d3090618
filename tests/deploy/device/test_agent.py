"""The agent as an app sees it: choosing, rewarding, new models, and what a learner gets of its log."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import random_images, random_text
from device_builders import WORDS, HandClock, dense_model, text_model
from hypothesis import given
from hypothesis import strategies as st

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import DataError
from fedbandit.core.ragged import Ragged
from fedbandit.data.text import tokenise
from fedbandit.deploy import Agent, DeviceModel, Outcome, Retention, SimulatedDraws
from fedbandit.deploy.device.model_in_use import encoded
from fedbandit.environments import Met
from fedbandit.federated.clients import Broadcast
from fedbandit.federated.state import Version
from fedbandit.policies import Greedy


@pytest.fixture
def agent(tmp_path):
    with Agent(tmp_path) as agent:
        agent.install(text_model())
        yield agent


def test_a_decision_and_its_reward(agent):
    decision = agent.choose("The cat sat on a mat.")
    assert decision.logged
    assert decision.name == f"tag{decision.action}"
    assert decision.model_version == 1
    assert agent.reward(decision.event_id, 1.0) is Outcome.RECORDED
    assert agent.reward(decision.event_id, 1.0) is Outcome.DUPLICATE
    events = agent.events().events
    assert events.actions.tolist() == [decision.action]
    assert events.rewards.tolist() == [1.0]
    assert events.propensities.tolist() == [decision.propensity]
    assert events.contexts.shared.ids.tolist() == list(range(6))


def test_a_folder_that_the_agent_makes_is_its_owners_alone(tmp_path):
    Agent(tmp_path / "new" / "folder").close()
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700


def test_without_a_model_there_is_no_choice(tmp_path):
    with Agent(tmp_path) as agent, pytest.raises(DataError, match="no model yet"):
        agent.choose("cat")


def test_the_propensity_is_the_one_that_was_drawn_with(agent):
    """Over many draws each action comes about as often as its propensity says (4 standard errors)."""
    decisions = [agent.choose("cat mat") for _ in range(800)]
    propensities = {decision.action: decision.propensity for decision in decisions}
    assert len({(decision.action, decision.propensity) for decision in decisions}) == len(
        propensities
    )
    for action, p in propensities.items():
        share = np.mean([decision.action == action for decision in decisions])
        assert abs(share - p) < 4 * np.sqrt(p * (1 - p) / 800)


def test_only_available_actions_are_chosen_and_logged_as_such(agent):
    by_name = [agent.choose("cat", available=["tag1", "tag3"]) for _ in range(20)]
    by_number = agent.choose("cat", available=[2])
    by_mask = agent.choose("cat", available=[True, False, False, False])
    unrestricted = agent.choose("cat")
    assert {decision.action for decision in by_name} <= {1, 3}
    assert (by_number.action, by_number.propensity) == (2, 1.0)
    assert (by_mask.action, by_mask.propensity) == (0, 1.0)
    for decision in (*by_name, by_number, by_mask, unrestricted):
        agent.reward(decision.event_id, 0.0)
    available = agent.events().available
    assert available[0].tolist() == [False, True, False, True]
    assert available[-3:].sum(axis=1).tolist() == [1, 1, 4]


@pytest.mark.parametrize("available", [[], ["tag9"], [4], [-1], [True, False], [1.5]])
def test_actions_that_do_not_exist_cannot_be_available(agent, available):
    with pytest.raises(ValueError, match="available"):
        agent.choose("cat", available=available)
    assert agent.totals().logged == 0


@pytest.mark.parametrize(
    "context", [3, [1.0, 2.0], ([0, 7], [1, 1]), ([1, 0], [1, 1]), ([0], [np.nan]), ([0, 1], [1])]
)
def test_a_text_model_takes_text(agent, context):
    with pytest.raises(ValueError, match="context"):
        agent.choose(context)


@pytest.mark.parametrize(
    "context", [np.zeros(5), np.zeros((3, 2)), [np.inf] * 6, np.zeros((1, 2, 3))]
)
def test_a_dense_model_takes_features_of_its_shape(tmp_path, context):
    with Agent(tmp_path) as agent:
        agent.install(dense_model())
        with pytest.raises(ValueError, match="context"):
            agent.choose(context)
        assert agent.choose([[1, 2, 3], [4, 5, 6]]).logged


@given(st.lists(st.sampled_from([*WORDS, "dog", "ran"]), max_size=30))
def test_text_becomes_counts_of_its_known_words_over_their_norm(words):
    model = text_model()
    found = encoded(words, model.kind, model.shape, None, model.bags)
    counts = np.array([words.count(word) for word in WORDS], np.float64)
    assert np.array_equal(found.ids, np.flatnonzero(counts))
    expected = counts[counts > 0] / np.sqrt(max(counts @ counts, 1.0))
    assert np.array_equal(found.values, expected.astype(np.float32))


def test_raw_text_is_split_as_the_importers_do(agent):
    for context in ("A cat; a MAT! C++?", tokenise("A cat; a MAT! C++?")):
        agent.reward(agent.choose(context).event_id, 1.0)
    contexts = agent.events().events.contexts.shared
    assert contexts.ids.tolist() == 2 * [1, 4, 5, 6]
    assert np.array_equal(*np.split(contexts.values, 2))


def test_events_of_several_model_versions_train_together(agent):
    versions = []
    for version in (2, 3):
        versions += [agent.choose("cat") for _ in range(2)]
        agent.install(text_model(version, seed=version))
    versions.append(agent.choose("cat"))
    for decision in reversed(versions):
        agent.reward(decision.event_id, 1.0)
    assert agent.events().events.versions.tolist() == [1, 1, 2, 2, 3]


def test_events_that_mean_something_else_are_left_out(agent):
    agent.reward(agent.choose("cat").event_id, 1.0)
    agent.install(text_model(2, vocabulary=("other", "words")))
    agent.reward(agent.choose("other").event_id, 1.0)
    logged = agent.events()
    assert (len(logged), logged.left_out) == (1, 1)
    assert logged.events.versions.tolist() == [2]


def test_a_model_installed_by_another_process_comes_into_use(tmp_path, agent):
    with Agent(tmp_path) as trainer:
        trainer.install(text_model(2, seed=2))
    assert agent.choose("cat").model_version == 2
    agent.use(1)
    assert agent.choose("cat").model_version == 1


def test_a_model_that_is_damaged_later_leaves_the_one_in_memory(tmp_path, agent, caplog):
    agent.choose("cat")
    (tmp_path / "models" / "current.json").write_text("{}")
    assert agent.choose("cat").model_version == 1
    assert "acting with model 1" in caplog.text


def test_what_was_counted_before_is_not_fresh(agent):
    early, late = agent.choose("cat"), agent.choose("mat")
    agent.reward(late.event_id, 1.0)
    first = agent.events()
    assert first.events.fresh.tolist() == [True]
    agent.reward(early.event_id, 0.5)  # older, but its reward is new
    second = agent.events(counted=int(first.settled.max()))
    assert second.events.fresh.tolist() == [True, False]


def test_an_empty_log_can_be_read(agent):
    logged = agent.events()
    assert (len(logged), logged.available) == (0, None)
    assert logged.events.bounds.tolist() == [0, 0]
    assert len(logged.events.contexts) == 0


def test_the_app_may_bring_its_own_policy(tmp_path):
    with Agent(tmp_path, policy=Greedy()) as agent:
        agent.install(text_model())
        assert {agent.choose("cat").propensity for _ in range(5)} == {1.0}


def test_the_retention_that_the_app_sets(tmp_path):
    clock = HandClock()
    rules = Retention(max_events=10, reward_within=60, without_reward="zero")
    with Agent(tmp_path, retention=rules, clocks=clock) as agent:
        agent.install(text_model())
        agent.reward(agent.choose("cat").event_id, 1.0)
        agent.choose("mat")
        assert len(agent.events()) == 0
        clock.wait(60)
        assert agent.events().events.rewards.tolist() == [1.0, 0.0]
        assert agent.retention() == rules


@pytest.mark.parametrize("kind", ["text", "images"])
def test_agents_do_what_the_simulator_does(tmp_path, kind):
    """A round of the simulator against one agent per client: the same choices, and the same sum of updates."""
    dataset = random_text(words=40) if kind == "text" else random_images()
    clients = np.array([4, 1, 6])
    config = Config.build(
        {"scenario": "scratch", "clients_per_round": 3, "seed": 5, "policy": {"beta": 0.5}}
    )
    experiment = build_experiment(config, dataset)
    work = experiment.bandit.work
    rng = np.random.default_rng(0)
    deployed, training = (
        rng.normal(size=experiment.layout.size).astype(np.float32) for _ in range(2)
    )
    broadcast = Broadcast(1, {"weights": training}, {0: Version(deployed)}, 1.0)
    simulated = work.act(clients, broadcast)
    visits = work.plan.visits(dataset.train, clients, 1)

    total, norms = np.zeros_like(training), []
    for number, client in enumerate(clients):
        mine = slice(simulated.bounds[number], simulated.bounds[number + 1])
        with Agent(tmp_path / str(client), uniform=SimulatedDraws(5, int(client), time=1)) as agent:
            agent.install(DeviceModel.of_experiment(experiment, deployed, 0))
            for row in visits.rows[mine]:
                contexts = dataset.train.shared(np.array([row]))
                context = (
                    (contexts.ids, contexts.values) if isinstance(contexts, Ragged) else contexts[0]
                )
                decision = agent.choose(context)
                met = Met.at_rows(dataset.train, np.array([row]), work.num_actions)
                reward = work.world.rewards(met, np.array([decision.action]))
                agent.reward(decision.event_id, float(reward[0]))
            events = agent.events().events
        assert np.array_equal(events.actions, simulated.actions[mine])
        assert np.array_equal(events.rewards, simulated.rewards[mine])
        np.testing.assert_allclose(events.propensities, simulated.propensities[mine], rtol=1e-5)
        update, norm = work.learner.train(training, events, 1.0)
        update.add_to(total)
        norms += list(norm)
    expected, expected_norms = work.learner.train(training, simulated, 1.0)
    reference = np.zeros_like(training)
    expected.add_to(reference)
    np.testing.assert_allclose(total, reference, atol=1e-6)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)


LIGHT = """
import sys
from fedbandit.deploy import Agent
sys.path.insert(0, sys.argv[2])
from device_builders import dense_model, text_model
for model, context in ((text_model(), "the cat"), (dense_model(), [0.0, 1, 2, 3, 4, 5])):
    with Agent(f"{sys.argv[1]}/{model.kind}") as agent:
        agent.install(model)
        agent.reward(agent.choose(context).event_id, 1.0)
        assert len(agent.events()) == 1
packages = {name.partition(".")[0] for name, module in sys.modules.items() if getattr(module, "__file__", None)}
print(*(packages - set(sys.stdlib_module_names) - {"device_builders"}))
"""


def test_a_linear_model_needs_numpy_safetensors_and_pydantic_alone(tmp_path):
    command = [
        sys.executable,
        "-c",
        LIGHT,
        str(tmp_path),
        str(Path(__file__).parents[2] / "helpers"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    started_with = {
        name for name in done.stdout.split() if name.startswith(("_", "site", "pywin32"))
    }
    of_pydantic = {"annotated_types", "pydantic_core", "typing_extensions", "typing_inspection"}
    needed = {"fedbandit", "numpy", "safetensors", "pydantic"}
    assert set(done.stdout.split()) - started_with - of_pydantic == needed
