"""Arrays in `.npz` files, LEAF's JSON, and Stack Exchange dumps."""

import json
import math

import numpy as np
import pytest
from published import image

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.importers import importing
from fedbandit.data.importers.arrays import ArrayOptions, import_arrays
from fedbandit.data.importers.images import import_leaf
from fedbandit.data.importers.stackexchange import StackExchangeOptions, import_stackexchange
from fedbandit.data.text import EMNIST_ACTIONS

ARRAYS = {"features": "images", "labels": "labels", "clients": "writers"}


def save(path, compressed=True, **arrays):
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return path


def handwriting(n=300):
    rng = np.random.default_rng(1)
    return {
        "images": rng.integers(0, 256, (n, 28, 28), np.uint8),
        "labels": np.arange(n, dtype=np.uint8) % 62,
        "writers": rng.integers(0, 9, n).astype(np.int16),
    }


@pytest.mark.parametrize("compressed", [True, False])
def test_inverted_images_become_one_minus_ink(tmp_path, compressed):
    arrays = handwriting()
    path = save(tmp_path / "a.npz", compressed, **arrays)
    options = ArrayOptions(**ARRAYS, invert=True, test_fraction=0)
    dataset = FederatedDataset.open(import_arrays(path, tmp_path / "out", options))
    assert dataset.train.features.dtype == np.uint8
    assert dataset.header.scale == 1 / 255
    order = np.argsort(arrays["writers"], kind="stable")
    expected = 1 - arrays["images"][order] / 255
    np.testing.assert_allclose(dataset.train.shared(np.arange(300)), expected, atol=1e-6)
    assert dataset.header.actions == EMNIST_ACTIONS
    assert dataset.header.lower_case[10] == 36


def test_images_are_held_out_within_writers(tmp_path):
    dataset = FederatedDataset.open(
        import_arrays(
            save(tmp_path / "a.npz", **handwriting()), tmp_path / "out", ArrayOptions(**ARRAYS)
        )
    )
    assert dataset.train.num_clients == 9
    assert dataset.train.num_examples + dataset.test.num_examples == 300
    assert 5 <= dataset.test.num_clients <= 9


def test_labels_may_be_names_or_a_matrix(tmp_path):
    arrays = handwriting(6)
    names = np.array(["cat", "dog", "cat", "ant", "dog", "ant"])
    path = save(tmp_path / "a.npz", **{**arrays, "labels": names})
    dataset = FederatedDataset.open(
        import_arrays(path, tmp_path / "o1", ArrayOptions(**ARRAYS, test_fraction=0))
    )
    assert dataset.header.actions == ("ant", "cat", "dog")
    path = save(tmp_path / "b.npz", **{**arrays, "labels": np.eye(6, 3, dtype=np.int64)})
    dataset = FederatedDataset.open(
        import_arrays(path, tmp_path / "o2", ArrayOptions(**ARRAYS, test_fraction=0))
    )
    assert dataset.header.multilabel
    assert dataset.header.action_counts == (1, 1, 1)
    assert dataset.header.lower_case == {}


def test_float_features_and_a_single_channel(tmp_path):
    arrays = handwriting(6)
    floats = (arrays["images"] / 255).astype(np.float64)[..., None]
    path = save(tmp_path / "a.npz", **{**arrays, "images": floats})
    options = ArrayOptions(**ARRAYS, invert=True, test_fraction=0)
    dataset = FederatedDataset.open(import_arrays(path, tmp_path / "out", options))
    assert dataset.header.shape == (28, 28)
    order = np.argsort(arrays["writers"], kind="stable")
    np.testing.assert_allclose(dataset.train.features, 1 - floats[order, ..., 0], atol=1e-6)


@pytest.mark.parametrize("compressed", [True, False])
def test_arrays_stored_by_columns_are_read(tmp_path, compressed, monkeypatch):
    monkeypatch.setattr("fedbandit.data.importers.arrays._BLOCK_BYTES", 10_000)  # several blocks
    arrays = handwriting(50)
    labels = np.eye(50, 5, dtype=np.int64)
    turned = {
        **arrays,
        "images": np.asfortranarray(arrays["images"]),
        "labels": np.asfortranarray(labels),
    }
    made = []
    for name, columns in (("rows", {**arrays, "labels": labels}), ("columns", turned)):
        path = save(tmp_path / f"{name}.npz", compressed, **columns)
        made.append(
            FederatedDataset.open(import_arrays(path, tmp_path / name, ArrayOptions(**ARRAYS)))
        )
    np.testing.assert_array_equal(made[0].train.features, made[1].train.features)
    np.testing.assert_array_equal(made[0].train.labels.ids, made[1].train.labels.ids)


def test_messages_never_name_what_is_written_on_the_way(tmp_path):
    for error in (OSError(5, "Input/output error", str(tmp_path / ".out.partial" / "train.spool" / "features")),
                  OSError(28, "No space left", str(tmp_path / ".out.partial" / "unpacked"))):  # fmt: skip
        with pytest.raises(DataError) as caught, importing(tmp_path / "out"):
            raise error
        assert str(caught.value).startswith(f"{tmp_path / 'out'}: ")


BAD_ARRAYS = {
    r"no array 'labels'; did you mean images": {"labels": None},
    r"row 2: label 62 is outside 0..61": {"labels": np.array([0, 1, 62, 3, 4, 5])},
    r"row 0: label -1 is outside": {"labels": np.array([-1, 1, 2, 3, 4, 5])},
    r"rows; they must have the same number": {"writers": np.arange(5)},
    r"writers must be one whole number or name": {"writers": np.ones(6)},
    r"holds Python objects": {"writers": np.array([object()] * 6)},
    r"is not finite": {"images": np.full((6, 2), np.nan)},
    r"--invert needs uint8 pixels or values": {"images": np.full((6, 2), 7.0)},
    r"must hold only 0 and 1": {"labels": np.full((6, 2), 2)},
    r"is a single number": {"labels": np.array(3)},
    r"must be numbers": {"images": np.array([["a"]] * 6)},
    r"a\.npz: writers: b'\\xff' is not text in UTF-8": {"writers": np.array([b"ok", b"\xff"] * 3)},
}


@pytest.mark.parametrize("match", BAD_ARRAYS)
def test_bad_arrays_are_refused(tmp_path, match):
    arrays = {**handwriting(6), **BAD_ARRAYS[match]}
    path = save(
        tmp_path / "a.npz", **{name: array for name, array in arrays.items() if array is not None}
    )
    with pytest.raises(DataError, match=match):
        import_arrays(path, tmp_path / "out", ArrayOptions(**ARRAYS, invert=True, actions=62))
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


def test_names_that_are_not_text_are_refused(tmp_path):
    path = save(tmp_path / "a.npz", **{**handwriting(6), "labels": np.array([b"cat", b"\xff"] * 3)})
    with pytest.raises(DataError, match=r"a\.npz: labels: b'\\xff' is not text in UTF-8"):
        import_arrays(path, tmp_path / "out", ArrayOptions(**ARRAYS))


@pytest.mark.parametrize("labels", [np.array(["cat", "dog"] * 3), np.eye(6, 3, dtype=np.int64)])
def test_a_number_of_actions_that_would_be_passed_over_is_refused(tmp_path, labels):
    path = save(tmp_path / "a.npz", **{**handwriting(6), "labels": labels})
    with pytest.raises(ConfigError, match=r"actions: labels (names them|has a column for each)"):
        import_arrays(path, tmp_path / "out", ArrayOptions(**ARRAYS, actions=3))


def test_damaged_archives_are_refused(tmp_path):
    whole = save(tmp_path / "a.npz", **handwriting()).read_bytes()
    place = whole.index(b"PK\x01\x02") + 6
    of_the_future = whole[:place] + b"\xad" + whole[place + 1 :]  # version 17.3 of the format
    for contents in (
        b"nothing",
        whole[:-100],
        whole[:5000] + bytes(500) + whole[5500:],
        of_the_future,
    ):
        (tmp_path / "a.npz").write_bytes(contents)
        with pytest.raises(DataError, match=r"a\.npz: .*damaged|truncated"):
            import_arrays(tmp_path / "a.npz", tmp_path / "out", ArrayOptions(**ARRAYS))
    with pytest.raises(DataError, match="no such file"):
        import_arrays(tmp_path / "b.npz", tmp_path / "out", ArrayOptions(**ARRAYS))
    path = save(tmp_path / "c.npz", **handwriting(9))
    with pytest.raises(ConfigError, match="case-map: needs the 62 classes"):
        import_arrays(path, tmp_path / "out", ArrayOptions(**ARRAYS, case_map=True))


def leaf_file(path, users, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        u: {"x": [image(u_, n) for n in range(k)], "y": [n % 62 for n in range(k)]}
        for u, u_, k in users
    }
    document = {
        "users": [u for u, *_ in users],
        "num_samples": [k for *_, k in users],
        "user_data": data,
    } | changes
    path.write_text(json.dumps(document))
    return path


def test_leaf_folders(tmp_path):
    leaf_file(tmp_path / "train" / "all_0.json", [("f1", 1, 3), ("f0", 2, 2), ("empty", 9, 0)])
    leaf_file(tmp_path / "train" / "all_1.json", [("f2", 3, 1)], hierarchies=["a", "b"])
    leaf_file(tmp_path / "test" / "all_0.json", [("f1", 4, 1)])
    dataset = FederatedDataset.open(import_leaf(tmp_path, tmp_path / "out"))
    assert [dataset.train.client_id(c) for c in range(3)] == ["f0", "f1", "f2"]
    assert dataset.train.sizes().tolist() == [2, 3, 1]
    assert dataset.test.num_examples == 1
    assert dataset.header.source["dropped_clients"] == 1
    assert dataset.header.actions == EMNIST_ACTIONS
    assert dataset.train.features.dtype == np.uint8
    expected = np.array(image(1, 0), np.float32)
    np.testing.assert_allclose(
        dataset.train.shared(np.array([2]))[0].reshape(-1), expected, atol=1e-6
    )


def test_leaf_without_a_test_folder_holds_out_examples(tmp_path):
    leaf_file(tmp_path / "train" / "all_0.json", [("f1", 1, 60)])
    dataset = FederatedDataset.open(import_leaf(tmp_path, tmp_path / "out", test_fraction=0.3))
    assert dataset.train.num_examples + dataset.test.num_examples == 60
    assert dataset.test.num_examples > 5


def test_leaf_members_may_come_in_any_order_with_others_between(tmp_path):
    known = json.loads(
        leaf_file(tmp_path / "train" / "a.json", [("a.b", 1, 2), ("user_data", 2, 1)]).read_text()
    )
    names = {
        "metadata": {"user_data": {"a.b": {"x": [[1]], "y": [9, 9]}}},
        **dict(reversed(known.items())),
    }
    (tmp_path / "train" / "a.json").write_text(json.dumps(names, indent=1))
    dataset = FederatedDataset.open(import_leaf(tmp_path, tmp_path / "out", test_fraction=0))
    assert dataset.train.client_ids.tolist() == [b"a.b", b"user_data"]
    assert dataset.train.sizes().tolist() == [2, 1]


BAD_LEAF = {
    "client f1: 2 examples, 'num_samples' promises 5": {"num_samples": [5]},
    "'users' and 'num_samples' differ": {"num_samples": [2, 2]},
    "client f1: 1 images, 2 labels": {"user_data": {"f1": {"x": [image(0, 0)], "y": [1, 2]}}},
    "client f1, example 0: label 62 is outside": {
        "user_data": {"f1": {"x": [image(0, 0)], "y": [62]}}
    },
    "client f1, example 0: not 784 finite": {"user_data": {"f1": {"x": [[1.0]], "y": [1]}}},
    "client f1, example 0: not 784 finite numbers": {
        "user_data": {"f1": {"x": [[[]] + [0.5] * 783], "y": [1]}}
    },
    r"a\.json: client f1: expected an object with the arrays": {"user_data": {"f1": [1]}},
    r"a\.json: not LEAF's JSON: 'num_samples' is not an array": {"num_samples": 2},
    r"a\.json: not LEAF's JSON, before the first client: lexical error: [^\n]*$": {
        "user_data": {"f1": math.nan}
    },
}


@pytest.mark.parametrize("match", BAD_LEAF)
def test_bad_leaf_files_are_refused(tmp_path, match):
    leaf_file(tmp_path / "train" / "a.json", [("f1", 1, 2)], **BAD_LEAF[match])
    with pytest.raises(DataError, match=match):
        import_leaf(tmp_path, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train"]


def test_a_leaf_user_that_is_no_name_is_refused(tmp_path):
    path = leaf_file(tmp_path / "train" / "a.json", [("f1", 1, 2)])
    path.write_text(json.dumps({**json.loads(path.read_text()), "users": [[1]]}))
    with pytest.raises(DataError, match=r"a\.json: \[1\] in 'users' is not the id of a client"):
        import_leaf(tmp_path, tmp_path / "out")


def test_truncated_leaf_files_are_refused(tmp_path):
    path = leaf_file(tmp_path / "train" / "a.json", [("f1", 1, 2)])
    whole = path.read_text()
    path.write_text(whole[:-30])
    with pytest.raises(DataError, match=r"a\.json: not LEAF's JSON"):
        import_leaf(tmp_path, tmp_path / "out")
    path.write_text(whole[:-1])
    with pytest.raises(DataError, match=r"a\.json: not LEAF's JSON, after client f1: [^\n]*$"):
        import_leaf(tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match="no JSON files"):
        import_leaf(tmp_path / "train", tmp_path / "out")


POSTS = """\ufeff<?xml version="1.0" encoding="utf-8"?>
<posts>
  <row Id="1" PostTypeId="1" OwnerUserId="7" Title="Citra hops?" Tags="&lt;hops&gt;&lt;c#&gt;"
       Body="&lt;p&gt;What are &lt;b&gt;hops&lt;/b&gt; &amp;amp; malt&lt;/p&gt;" />
  <row Id="2" PostTypeId="2" OwnerUserId="7" Body="an answer" />
  <row Id="3" PostTypeId="1" Title="nobody's" Tags="|hops|" Body="" />
  <row Id="4" PostTypeId="1" OwnerUserId="8" Title="Malt" Tags="|malt|hops|" Body="" />
</posts>"""


def test_questions_of_a_dump(tmp_path):
    (tmp_path / "Posts.xml").write_text(POSTS)
    options = StackExchangeOptions(test_fraction=0)
    dataset = FederatedDataset.open(import_stackexchange(tmp_path, tmp_path / "out", options))
    assert (dataset.train.num_clients, dataset.train.num_examples) == (2, 2)
    assert dataset.header.actions == ("hops", "c#", "malt")
    assert sorted(dataset.vocabulary()) == ["are", "citra", "hops", "malt", "what"]
    assert dataset.train.labels.slice(0, 1).ids.tolist() == [0, 1]
    assert dataset.train.labels.slice(1, 2).ids.tolist() == [0, 2]
    assert dataset.header.source["dropped_rows_without_client"] == 1


def test_damaged_dumps_are_refused(tmp_path):
    path = tmp_path / "Posts.xml"
    for contents, match in {
        POSTS[:400]: "damaged after [0-9]+ posts",
        "": "damaged after 0 posts",
        "<posts></posts>": "holds no posts",
        '<posts><row PostTypeId="2"/></posts>': "no question with an owner and tags",
    }.items():
        path.write_text(contents)
        with pytest.raises(DataError, match=match):
            import_stackexchange(path, tmp_path / "out")
    with pytest.raises(DataError, match="no such file"):
        import_stackexchange(tmp_path / "none.xml", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["Posts.xml"]
