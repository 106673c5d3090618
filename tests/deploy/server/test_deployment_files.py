"""Files that a deployment's configuration names: what is not such a file is one line, at once."""

import os

import pytest
from fuzz_mutations import SPECIAL
from network_builders import Network, a_deployment, coordinator, devices, settle, values

from fedbandit.core.errors import ConfigError, FedbanditError
from fedbandit.deploy.server.operator import key_line

pytestmark = pytest.mark.usefixtures("no_wait")


@pytest.mark.parametrize("special", SPECIAL, ids=lambda special: special.name)
@pytest.mark.parametrize("key", ["actions", "vocabulary", "encoder", "initial"])
def test_what_is_no_file_is_refused_in_one_line(tmp_path, key, special):
    special.make(tmp_path / "named")
    given = values(**{key: "named"})
    if key == "vocabulary":
        del given["deployment"]["shape"]
    with pytest.raises(FedbanditError, match=r"deployment.*named") as caught:
        a_deployment(tmp_path, given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "payload"),
    [
        ("vocabulary", b"\xff\xfe"),
        *(("encoder", payload) for payload in (b"\xff\xfe", b"[" * 100_000, b"{}", b"")),
        *(("initial", payload) for payload in (b"\xff\xfe", b"[" * 100_000, b"{}", b"")),
    ],
)
def test_other_bytes_are_refused_in_one_line(tmp_path, key, payload):
    (tmp_path / "named").write_bytes(payload)
    given = values(**{key: "named"})
    if key == "vocabulary":
        del given["deployment"]["shape"]
    with pytest.raises(FedbanditError, match=rf"deployment\.{key}: .*named") as caught:
        a_deployment(tmp_path, given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("special", SPECIAL, ids=lambda special: special.name)
def test_a_key_that_is_no_file_is_refused_in_one_line(tmp_path, special):
    special.make(tmp_path / "key.pub")
    with pytest.raises(FedbanditError, match=r"key\.pub") as caught:
        key_line(tmp_path / "key.pub")
    assert "\n" not in str(caught.value)


def test_a_model_for_other_shapes_is_refused(tmp_path):
    deployment = a_deployment(tmp_path)
    payload = deployment.device_model(deployment.start().deployed[0], 0).to_bytes()
    (tmp_path / "model.safetensors").write_bytes(payload)
    assert a_deployment(tmp_path, values(initial="model.safetensors")).initial.size == 24
    with pytest.raises(ConfigError, match=r"deployment.initial: .* do not fit a model of 12"):
        a_deployment(tmp_path, values(initial="model.safetensors", shape=[3]))


@pytest.mark.parametrize("name", ["state-1.safetensors", "models/model-0.safetensors"])
def test_a_terabyte_in_the_place_of_a_state_is_never_read(tmp_path, name):
    deployment, participants = a_deployment(tmp_path), devices(tmp_path, 2)
    settle(deployment, participants)
    server = coordinator(deployment, Network(participants))
    server.run(attempts=0)
    server._store.close()
    os.truncate(deployment.folder / name, 1 << 40)
    if name.startswith("models"):  # derived: written again
        coordinator(deployment, Network(participants))._store.close()
        assert (deployment.folder / name).stat().st_size < 10_000
    else:
        with pytest.raises(FedbanditError, match=r"state-1.*damaged") as caught:
            coordinator(deployment, Network(participants))
        assert "\n" not in str(caught.value)
