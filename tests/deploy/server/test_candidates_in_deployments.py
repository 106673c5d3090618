"""Rounds over candidates: devices choose among items with features, a server coordinates them."""

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, devices, values
from transports import SECURE

from fedbandit.core.contexts import ItemSpec
from fedbandit.core.errors import ConfigError
from fedbandit.deploy import DeviceModel, ItemCatalogue
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.device.secure_round import Identity

ITEMS = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
TASTE = np.array([1.0, -1.0, 0.5], np.float32)  # what everybody likes, and nobody was told
WIDTH = 3 + 2 + 6  # of an item, of the moment, and their products


def a_file(folder, **changes):
    """An untrained linear model over 20 photos: 2 features of the moment, 3 of a photo."""
    given = {
        "version": 0,
        "weights": {"weight": np.zeros((WIDTH, 1), np.float32), "bias": np.zeros(1, np.float32)},
        "actions": (),
        "kind": "dense",
        "shape": (2,),
        "policy": {"name": "softmax", "beta": 0.3},
        "items": ItemSpec("dense", (3,), 5.0, 20),
        "catalogue": ItemCatalogue(tuple(f"photo-{i}" for i in range(20)), ITEMS),
    }
    path = folder / "photos.safetensors"
    path.write_bytes(DeviceModel(**{**given, **changes}).to_bytes())
    return path


def over_candidates(folder, **more):
    a_file(folder)
    given = values(initial="photos.safetensors")
    for key in ("actions", "shape"):
        del given["deployment"][key]
    return {**given, "rounds": 8, "deploy_every": 2, **more}


def live(agent, rng, events=30):
    """Choose among photos of the catalogue and one that nobody has seen; the mean reward."""
    found = []
    for _ in range(events):
        new = rng.normal(size=3).astype(np.float32)
        listed = rng.choice(20, 4, replace=False)
        decision = agent.choose(rng.random(2), candidates=[*listed.tolist(), ("mine", new)])
        liked = np.stack([*ITEMS[listed], new])[decision.action] @ TASTE
        found.append(float(liked > 0))
        agent.reward(decision.event_id, found[-1])
    return float(np.mean(found))


@pytest.mark.parametrize("how", ["plain", "gate", "secure"])
def test_a_server_trains_a_model_over_candidates_that_devices_choose_better_with(tmp_path, how):
    given = over_candidates(tmp_path)
    given |= {"gate": {"confidence": 0.5, "limit": 10.0}} if how == "gate" else {}
    given["deployment"] |= SECURE if how == "secure" else {}
    deployment, found = a_deployment(tmp_path, given), []
    own = {"identity": Identity(unsigned=True), "secure_only": how == "secure"}
    participants = {n: Participant(p.agent, **own) for n, p in devices(tmp_path, 4).items()}
    rng, network = np.random.default_rng(5), Network(participants)
    server = coordinator(deployment, network)
    first = deployment.device_model(deployment.start().deployed[0], 0).to_bytes()
    for participant in participants.values():
        participant.agent.install(first)
    for _ in range(8):
        found.append(np.mean([live(part.agent, rng) for part in participants.values()]))
        metrics = server.attempt()
        assert (metrics["clients"], metrics["refused"], metrics["events"]) == (4, {}, 120)
    assert server.version >= 1
    agent = participants[100].agent
    assert agent.model.space == deployment.space
    assert agent.model.catalogue.names[3] == "photo-3"  # every version brings the catalogue
    assert np.mean(found[-2:]) > np.mean(found[:2]) + 0.1, found


def test_a_server_over_candidates_resumes_and_an_evaluator_reads_its_models(tmp_path):
    deployment, participants = (
        a_deployment(tmp_path, over_candidates(tmp_path)),
        devices(tmp_path, 3),
    )
    rng = np.random.default_rng(1)
    first = deployment.device_model(deployment.start().deployed[0], 0).to_bytes()
    for participant in participants.values():
        participant.agent.install(first)
        live(participant.agent, rng)
    server = coordinator(deployment, Network(participants))
    server.run(attempts=2)
    server._store.close()
    again = coordinator(a_deployment(tmp_path, over_candidates(tmp_path)), Network(participants))
    np.testing.assert_array_equal(again.state.weights, server.state.weights)
    model = DeviceModel.from_bytes(again._store.model_path(1).read_bytes())
    assert (model.items, len(model.catalogue)) == (ItemSpec("dense", (3,), 5.0, 20), 20)
    again._store.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shape": [2]}, "deployment.shape: over candidates"),
        ({"initial": None}, "deployment.actions: missing"),
        ({"actions": ["a", "b"], "shape": [2]}, "do not fit a model of 6 parameters"),
    ],
)
def test_what_does_not_go_with_candidates_is_refused(tmp_path, given, message):
    found = over_candidates(tmp_path)
    with pytest.raises(ConfigError, match=message):
        a_deployment(tmp_path, {**found, "deployment": {**found["deployment"], **given}})


def test_weights_of_other_features_and_rules_without_a_scale_are_refused(tmp_path):
    found = over_candidates(tmp_path, objective={"name": "weighted-regression"})
    with pytest.raises(ConfigError, match=r"objective\.scale: missing"):
        a_deployment(tmp_path, found)
    spelled = {"name": "linear", "features": ["item", "shared", "shared*item"]}
    with pytest.raises(ConfigError, match=r"photos\.safetensors: its model section differs"):
        a_deployment(tmp_path, over_candidates(tmp_path, model=spelled))
