"""Wrong bytes in a data set folder: one line that names the file, never a crash, a traceback or other numbers."""

import json
import os
import shutil

import numpy as np
import pytest
from builders import add_example, with_checksums
from forked_runs import outcomes

from fedbandit.core.errors import DataError
from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.writer import DatasetWriter

WORDS, ACTIONS = 30, 5


def make(folder, kind, clients=12, each=4):
    rng = np.random.default_rng(3)
    more = {"shape": (WORDS,)} if kind == "sparse" else {"shape": (3, 2)}
    more |= {"kind": "sparse" if kind == "sparse" else "dense", "logged": kind == "logged"}
    with DatasetWriter(
        folder, name="d", actions="abcde", multilabel=kind != "logged", **more
    ) as writer:
        for client in range(clients):
            for row in range(each):
                words = np.sort(rng.choice(WORDS, 5, replace=False))
                x = (words, rng.random(5)) if kind == "sparse" else rng.random((3, 2))
                if kind == "logged":
                    log = {"action": int(rng.integers(ACTIONS)), "reward": 1.0, "propensity": 0.5}
                    add_example(writer, f"c{client:02d}", x, available=range(ACTIONS), **log)
                else:
                    add_example(
                        writer, f"c{client:02d}", x, rng.choice(ACTIONS, 1 + row % 2, replace=False)
                    )
        return writer.finish()


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    return {kind: make(folder / kind, kind) for kind in ("sparse", "dense", "logged")}


def change(name, edit):
    """An edit of one array of the training split; what it returns replaces the array."""

    def apply(folder):
        path = folder / "train" / f"{name}.npy"
        array = np.load(path)
        edited = edit(array)
        np.save(path, array if edited is None else edited)

    return apply


def put(name, index, value):
    return change(name, lambda array: array.__setitem__(index, value))


def header(**fields):
    def apply(folder):
        path = folder / "header.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return apply


def raw(name, old, new):
    """Replace bytes of a file, for example of an array's own header."""

    def apply(folder):
        path = folder / "train" / f"{name}.npy"
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new, 1))

    return apply


def cut(name, amount):
    def apply(folder):
        path = folder / "train" / f"{name}.npy"
        path.write_bytes(path.read_bytes()[:-amount])

    return apply


def replaced_by(name, data):
    return lambda folder: (folder / "train" / f"{name}.npy").write_bytes(data)


# What was done -> the kind of data set, the edit, and what the one line must say.
CRAFTED = {
    "word id of 2e9": (
        "sparse",
        put("feature_ids", 7, 2_000_000_000),
        "feature_ids.npy, entry 7: 2000000000",
    ),
    "word id of -5e6": (
        "sparse",
        put("feature_ids", 7, -5_000_000),
        "feature_ids.npy, entry 7: -5000000",
    ),
    "word id of -1": (
        "sparse",
        put("feature_ids", 0, -1),
        "feature_ids.npy, entry 0: -1 is outside 0..29",
    ),
    "word id past the vocabulary": ("sparse", put("feature_ids", -1, WORDS), "30 is outside 0..29"),
    "label of 2e9": ("sparse", put("label_ids", 3, 2_000_000_000), "label_ids.npy, entry 3"),
    "label past the actions": (
        "sparse",
        put("label_ids", 3, ACTIONS),
        "label_ids.npy, entry 3: 5 is outside 0..4",
    ),
    "label -1": ("dense", put("label_ids", 3, -1), "label_ids.npy, entry 3: -1"),
    "label offsets beyond": ("sparse", put("label_offsets", 5, 10**9), "label_offsets.npy, entry"),
    "label offsets negative": (
        "sparse",
        put("label_offsets", 5, -(10**9)),
        "label_offsets.npy, entry 5",
    ),
    "label offsets from 1": ("sparse", put("label_offsets", 0, 1), "label_offsets.npy, entry 0"),
    "last label offset": ("sparse", put("label_offsets", -1, 10**9), "label_ids.npy: has shape"),
    "feature offsets descend": (
        "sparse",
        change("feature_offsets", lambda a: a[[0, 2, 1, *range(3, len(a))]]),
        "_offsets",
    ),
    "client offsets descend": (
        "sparse",
        change("offsets", lambda a: a[[0, 2, 1, *range(3, len(a))]]),
        "train/offsets.npy, entry",
    ),
    "client offsets beyond": ("sparse", put("offsets", 4, 10**12), "train/offsets.npy, entry"),
    "offsets negative at the end": ("sparse", put("offsets", -1, -5), "train/offsets.npy"),
    "shorter values": (
        "sparse",
        change("feature_values", lambda a: a[:-20]),
        "feature_values.npy: has shape",
    ),
    "longer ids": (
        "sparse",
        change("feature_ids", lambda a: np.append(a, a[:1])),
        "feature_ids.npy: has shape",
    ),
    "empty offsets": ("sparse", change("offsets", lambda a: a[:0]), "offsets.npy: has shape"),
    "fewer clients": ("sparse", change("clients", lambda a: a[:-1]), "offsets.npy: has shape"),
    "a smaller vocabulary": ("sparse", header(shape=[10]), "feature_ids.npy, entry"),
    "a smaller shape": ("dense", header(shape=[3, 1]), "features.npy: has shape"),
    "fewer actions": (
        "sparse",
        header(actions=["a", "b"], action_counts=[1, 1]),
        "label_ids.npy, entry",
    ),
    "ids as int64": (
        "sparse",
        change("feature_ids", lambda a: a.astype(np.int64)),
        "feature_ids.npy: holds int64",
    ),
    "ids as floats": (
        "sparse",
        change("label_ids", lambda a: a.astype(np.float32)),
        "label_ids.npy: holds float32",
    ),
    "offsets as int32": (
        "sparse",
        change("offsets", lambda a: a.astype(np.int32)),
        "offsets.npy: holds int32",
    ),
    "values as float64": (
        "sparse",
        change("feature_values", lambda a: a.astype(np.float64)),
        "holds float64",
    ),
    "other byte order": (
        "sparse",
        change("feature_ids", lambda a: a.astype(">i4")),
        "feature_ids.npy: holds >i4",
    ),
    "features as float64": (
        "dense",
        change("features", lambda a: a.astype(np.float64)),
        "features.npy: holds float64",
    ),
    "features by columns": (
        "dense",
        change("features", np.asfortranarray),
        "features.npy: is stored by columns",
    ),
    "ids in two dimensions": (
        "sparse",
        change("feature_ids", lambda a: a.reshape(-1, 5)),
        "feature_ids.npy: has shape",
    ),
    "a single number": (
        "sparse",
        change("offsets", lambda a: np.array(3)),
        "offsets.npy: has shape",
    ),
    "clients as numbers": (
        "sparse",
        change("clients", lambda a: np.arange(len(a))),
        "clients.npy: holds int64",
    ),
    "clients not sorted": (
        "sparse",
        change("clients", lambda a: a[::-1].copy()),
        "clients.npy, entry 1",
    ),
    "a client twice": ("sparse", put("clients", 1, b"c00"), "clients.npy, entry 1"),
    "a client without an id": ("sparse", put("clients", 0, b""), "clients.npy, entry 0"),
    "client ids that are not text": (
        "sparse",
        put("clients", 11, b"\xff1"),
        "clients.npy, entry 11",
    ),
    "Python objects": (
        "sparse",
        change("label_ids", lambda a: a.astype(object)),
        "label_ids.npy: holds object",
    ),
    "NaN values": (
        "sparse",
        put("feature_values", 9, np.nan),
        "feature_values.npy, entry 9: nan is not finite",
    ),
    "infinite values": (
        "sparse",
        put("feature_values", 9, np.inf),
        "feature_values.npy, entry 9: inf is not finite",
    ),
    "NaN features": (
        "dense",
        put("features", (4, 1, 1), np.nan),
        "features.npy, row 4: nan is not finite",
    ),
    "infinite features": (
        "dense",
        put("features", (47, 2, 1), -np.inf),
        "features.npy, row 47: -inf is not finite",
    ),
    "action outside": (
        "logged",
        put("actions", 2, ACTIONS),
        "actions.npy, entry 2: 5 is outside 0..4",
    ),
    "action of 1e9": ("logged", put("actions", 2, 10**9), "actions.npy, entry 2"),
    "reward NaN": ("logged", put("rewards", 2, np.nan), "rewards.npy, entry 2: nan is not finite"),
    "propensity 0": (
        "logged",
        put("propensities", 2, 0.0),
        "propensities.npy, entry 2: 0.0 is outside (0, 1]",
    ),
    "propensity 1.5": (
        "logged",
        put("propensities", 2, 1.5),
        "propensities.npy, entry 2: 1.5 is outside (0, 1]",
    ),
    "propensity NaN": ("logged", put("propensities", 2, np.nan), "propensities.npy, entry 2"),
    "available outside": ("logged", put("available_ids", 6, 99), "available_ids.npy, entry 6: 99"),
    "availability of fewer rows": (
        "logged",
        change("available_offsets", lambda a: a[:-1]),
        "available_offsets.npy: has",
    ),
    "shorter rewards": ("logged", change("rewards", lambda a: a[:-1]), "rewards.npy: has shape"),
    "a shape that overflows": (
        "sparse",
        raw("label_ids", b"'shape': (72,), }", b"'shape': (2**62,)}"),
        "label_ids.npy: dam",
    ),
    "a large shape": (
        "sparse",
        raw("label_ids", b"'shape': (72,), }    ", b"'shape': (9999999,)} "),
        "label_ids.npy",
    ),
    "a negative shape": (
        "sparse",
        raw("label_ids", b"'shape': (72,)", b"'shape': (-2,)"),
        "label_ids.npy",
    ),
    "a damaged dtype": ("sparse", raw("label_ids", b"'<i4'", b"'<q9'"), "label_ids.npy: damaged"),
    "a dtype without size": ("sparse", raw("clients", b"'|S3'", b"'|S0'"), "clients.npy: holds"),
    "a header that is no header": (
        "sparse",
        raw("label_ids", b"{'descr'", b"{{{{{{{("),
        "label_ids.npy: damaged",
    ),
    "no magic": ("sparse", raw("label_ids", b"\x93NUMPY", b"\x93NUMPI"), "label_ids.npy: damaged"),
    "an archive": (
        "sparse",
        replaced_by("label_ids", b"PK\x03\x04" + bytes(100)),
        "label_ids.npy: damaged",
    ),
    "an empty file": ("sparse", replaced_by("label_ids", b""), "label_ids.npy: damaged"),
    "a truncated file": ("sparse", cut("feature_values", 8), "feature_values.npy: truncated"),
    "a file with more at its end": (
        "sparse",
        lambda f: (f / "train" / "offsets.npy").write_bytes(
            (f / "train" / "offsets.npy").read_bytes() + bytes(8)
        ),
        "train/offsets.npy: has 8 bytes too many",
    ),
    "a folder in place of a file": (
        "sparse",
        lambda f: ((f / "train" / "offsets.npy").unlink(), (f / "train" / "offsets.npy").mkdir()),
        "train/offsets.npy: ",
    ),
    "a pipe in place of a file": (
        "sparse",
        lambda f: ((f / "train" / "offsets.npy").unlink(), os.mkfifo(f / "train" / "offsets.npy")),
        "train/offsets.npy: is not a file",
    ),
    "shape as text": ("sparse", header(shape="30"), "header.json: shape"),
    "shape negative": ("dense", header(shape=[-3, 2]), "header.json: shape"),
    "shape of floats": ("dense", header(shape=[3.0, 2]), "header.json: shape"),
    "two sides for sparse text": ("sparse", header(shape=[30, 2]), "header.json: shape"),
    "another kind": ("sparse", header(kind="audio"), "header.json: kind"),
    "dense as sparse": (
        "dense",
        header(kind="sparse", shape=[30]),
        "feature_offsets.npy is missing",
    ),
    "actions as text": ("sparse", header(actions="abcde"), "header.json: actions"),
    "actions as numbers": ("sparse", header(actions=[1, 2, 3, 4, 5]), "header.json: actions"),
    "no actions": ("sparse", header(actions=[], action_counts=[]), "header.json: actions"),
    "counts of other actions": ("sparse", header(action_counts=[1]), "header.json: action_counts"),
    "counts as text": ("sparse", header(action_counts=["1"] * 5), "header.json: action_counts"),
    "negative counts": ("sparse", header(action_counts=[-1] * 5), "header.json: action_counts"),
    "published counts of others": (
        "sparse",
        header(published_counts=[1, 2]),
        "header.json: published_counts",
    ),
    "case map outside": ("sparse", header(lower_case=[[0, 99]]), "header.json: lower_case"),
    "case map as numbers": ("sparse", header(lower_case=[1, 2]), "header.json: lower_case"),
    "scale NaN": ("dense", header(scale=float("nan")), "header.json: scale"),
    "scale infinite": ("dense", header(scale=1e400), "header.json: scale"),
    "scale as text": ("dense", header(scale="1"), "header.json: scale"),
    "logged as text": ("dense", header(logged="no"), "header.json: logged"),
    "name as number": ("dense", header(name=7), "header.json: name"),
    "an unknown field": ("dense", header(surprise=7), "header.json: surprise"),
    "a deep header": (
        "dense",
        lambda f: (f / "header.json").write_text("[" * 200_000),
        "header.json: unreadable",
    ),
    "a header that is no text": (
        "dense",
        lambda f: (f / "header.json").write_bytes(b"\xff\xfe{"),
        "header.json: unread",
    ),
}


@pytest.fixture(scope="module")
def ended(originals, tmp_path_factory):
    """All crafted folders, each opened and run in a process of its own."""
    root = tmp_path_factory.mktemp("crafted")
    folders = {}
    for number, (what, (kind, edit, _)) in enumerate(CRAFTED.items()):
        folders[what] = shutil.copytree(originals[kind], root / str(number))
        edit(folders[what])
        with_checksums(folders[what])
    found = outcomes(list(folders.values()))
    return {what: found[folder] for what, folder in folders.items()}


@pytest.mark.parametrize("what", CRAFTED)
def test_what_is_wrong_is_one_line_that_names_the_place(ended, what):
    assert ended[what].startswith("DataError: "), ended[what]
    assert "\n" not in ended[what]
    assert CRAFTED[what][2] in ended[what]


def test_flipped_bits_in_ids_never_crash(tmp_path):
    """Whatever would leave an array is refused, even where the checksums are right."""
    rng = np.random.default_rng(5)
    folders, whole = [], make(tmp_path / "whole", "sparse")
    for number in range(5):
        for name, finish in (("damaged", lambda folder: folder), ("signed", with_checksums)):
            folder = shutil.copytree(whole, tmp_path / f"{name}-{number}")
            path = folder / "train" / "feature_ids.npy"
            data = bytearray(path.read_bytes())
            for bit in rng.integers(128 * 8, len(data) * 8, 20):
                data[bit // 8] ^= 1 << (bit % 8)
            path.write_bytes(data)
            folders.append(finish(folder))
    for folder, outcome in outcomes([whole, *folders]).items():
        if folder == whole:
            assert outcome.startswith("ran "), outcome
        else:
            assert outcome.startswith("DataError: "), (folder.name, outcome)
            assert "feature_ids.npy" in outcome


def test_whole_folders_still_open(originals):
    for folder in originals.values():
        assert FederatedDataset.open(folder).train.num_examples == 48


def test_what_the_door_would_refuse_is_not_written(tmp_path):
    with pytest.raises(DataError, match="float32 or uint8, not float64"):
        DatasetWriter(
            tmp_path / "d", name="d", kind="dense", shape=(1,), actions="ab", dtype=np.float64
        )
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_of_another_length_is_refused(tmp_path):
    with DatasetWriter(
        tmp_path / "d", name="d", kind="sparse", shape=(2,), actions="ab", vocabulary=["x", "y"]
    ) as writer:
        add_example(writer, "a", (np.array([1]), np.array([1.0])), [0])
        folder = writer.finish()
    assert FederatedDataset.open(folder).vocabulary() == ["x", "y"]
    (folder / "vocabulary.txt").write_text("x\n")
    with_checksums(folder)
    with pytest.raises(DataError, match=r"vocabulary\.txt: 1 words, contexts have 2"):
        FederatedDataset.open(folder).vocabulary()
