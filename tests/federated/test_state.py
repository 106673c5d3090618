"""A state is written and read as it is, and what version 0.1 wrote is read as it was meant."""

import json
from dataclasses import replace

import numpy as np
import pytest
from core_samples import config, played, text
from safetensors.numpy import save

from fedbandit.core.errors import DataError
from fedbandit.core.files import pack, unpack
from fedbandit.federated.state import DamagedState, load_state, save_state


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_a_state_comes_back_as_it_was(algorithm, tmp_path):
    _, simulation = played(config(algorithm__name=algorithm), text())
    state = simulation.state
    save_state(state, tmp_path / "state.safetensors")
    again = load_state(tmp_path / "state.safetensors")
    assert again.server_state["weights"] is again.weights  # written once
    for name in ("server_state", "deployed"):
        assert set(getattr(again, name)) == set(getattr(state, name))
    for name, value in state.server_state.items():
        np.testing.assert_array_equal(again.server_state[name], value)
    for number, version in state.deployed.items():
        np.testing.assert_array_equal(again.deployed[number].weights, version.weights)
        assert again.deployed[number].progress == version.progress
    plain = {"server_state": {}, "deployed": {}, "weights": None}
    assert replace(again, **plain) == replace(state, **plain)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The bytes of a checkpoint."""
    path = tmp_path_factory.mktemp("state") / "state.safetensors"
    save_state(played(config(), text())[1].state, path)
    return path.read_bytes()


def repacked(payload, change):
    """A checkpoint with other numbers or arrays, and a checksum that matches them."""
    tensors, texts = unpack(payload)
    scalars = json.loads(texts["state"])
    change(scalars, tensors)
    return pack(tensors, {"state": json.dumps(scalars)})


def test_every_flipped_bit_is_noticed(written, tmp_path):
    path = tmp_path / "state.safetensors"
    for position in [*range(0, 400, 7), *range(400, len(written), 997), len(written) - 1]:
        damaged = bytearray(written)
        damaged[position] ^= 1 << position % 8
        if (
            damaged[position : position + 1].isspace()
            and written[position : position + 1].isspace()
        ):
            continue
        path.write_bytes(damaged)
        with pytest.raises(DamagedState, match="damaged checkpoint"):
            load_state(path)


def test_a_file_cut_anywhere_is_damaged(written, tmp_path):
    path = tmp_path / "state.safetensors"
    for length in [*range(40), *range(40, len(written), 499)]:
        path.write_bytes(written[:length])
        with pytest.raises(DamagedState):
            load_state(path)


def test_a_file_of_this_layout_without_a_checksum_is_read(written, tmp_path):
    tensors, texts = unpack(written)
    (tmp_path / "old.safetensors").write_bytes(save(tensors, metadata=texts))
    (tmp_path / "new.safetensors").write_bytes(written)
    old, new = load_state(tmp_path / "old.safetensors"), load_state(tmp_path / "new.safetensors")
    np.testing.assert_array_equal(old.weights, new.weights)
    assert old.round == new.round


@pytest.mark.parametrize(
    "change",
    [
        lambda s, t: s.update(round="5"),
        lambda s, t: s.update(round=-1),
        lambda s, t: s.update(round=True),
        lambda s, t: s.update(round=2.5),
        lambda s, t: s.update(clip_norm=float("nan")),
        lambda s, t: s.update(clip_norm=-1.0),
        lambda s, t: s.update(clip_norm=10**400),
        lambda s, t: s.update(reward_total=float("inf")),
        lambda s, t: s.update(rewarded_rounds=10**9),
        lambda s, t: s.update(events=None),
        lambda s, t: s.update(extra=[]),
        lambda s, t: s.update(progress=3),
        lambda s, t: s["progress"].clear(),
        lambda s, t: next(iter(s["progress"].values())).update(rounds="x"),
        lambda s, t: next(iter(s["progress"].values())).update(other=1),
        lambda s, t: s.update(same_as_weights="weights"),
        lambda s, t: s.update(surprise=1),
        lambda s, t: s.pop("round"),
        lambda s, t: t.pop("weights"),
        lambda s, t: t.update(weights=t["weights"][:-1]),
        lambda s, t: t.update(weights=t["weights"].reshape(1, -1)),
        lambda s, t: t.update(weights=t["weights"].astype(np.int64)),
        lambda s, t: t["weights"].fill(np.nan),
        lambda s, t: t.update({"deployed/x": t["weights"]}),
        lambda s, t: t.update({"deployed/-1": t["weights"]}),
    ],
)
def test_wrong_types_shapes_and_numbers_are_refused_though_the_checksum_is_right(
    change, written, tmp_path
):
    path = tmp_path / "state.safetensors"
    path.write_bytes(repacked(written, change))
    with pytest.raises(DamagedState, match="damaged checkpoint"):
        load_state(path)


def test_an_infinite_clip_norm_is_no_damage(written, tmp_path):
    path = tmp_path / "state.safetensors"
    path.write_bytes(repacked(written, lambda s, t: s.update(clip_norm=float("inf"))))
    assert load_state(path).clip_norm == float("inf")


def test_what_cannot_be_read_is_not_called_damaged(tmp_path):
    with pytest.raises(DataError, match="cannot be read: No such file") as missing:
        load_state(tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot be read: is not a file") as folder:
        load_state(tmp_path)
    assert not {type(missing.value), type(folder.value)} & {DamagedState}
