"""Real files and messages of every kind that fedbandit reads, each with the program that reads it.

`use` returns what came of it; for kinds with checksums that must be what comes of the undamaged files, or a refusal.
"""

import hashlib
import io
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from builders import add_example, with_checksums
from fuzz_mutations import SPECIAL, Special, signed_anew, spoiled, to_npy
from network_builders import Network, a_deployment, coordinator, devices, live, settle, values
from published import emnist_rows, pack, sentence, write_counts, write_sqlite
from small_runs import small_config

from fedbandit.config import Config, read_toml
from fedbandit.core.errors import DataError
from fedbandit.data import FederatedDataset
from fedbandit.data.importers import importing
from fedbandit.data.writer import DatasetWriter
from fedbandit.deploy import Agent
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.messages import Reply
from fedbandit.federated.state import load_state

WORDS, ACTIONS = 30, 5
Files = dict[str, bytes | Special]


@dataclass(frozen=True)
class Kind:
    """Files in a folder, and what reads them."""

    files: dict[str, bytes]
    use: Callable[[Path], Any]
    checked: bool = False  # another result than that of the undamaged files is a failure
    spoil: Callable[..., bytes] = spoiled
    spared: tuple[str, ...] = ()  # files that are not damaged
    by_field: tuple[
        str, ...
    ] = ()  # files whose bytes are somebody else's to check: only what they say is changed
    sibling: dict[str, bytes] | None = None  # another run, whose files take the place of its own
    special: bool = False  # whether something that is no file may stand there
    takes_long: bool = False

    def damaged(self, rng: Any) -> Files:
        """The files with one of them spoiled, exchanged for its sibling's, or no file any more."""
        names = sorted(self.files.keys() - set(self.spared))
        way = rng.random() if self.special else 1.0
        if way < 0.2:
            return {**self.files, rng.choice(names): rng.choice(SPECIAL)}
        if way < 0.4 and self.sibling is not None:
            name = rng.choice(names)
            there = {k: v for k, v in self.files.items() if k != name}
            return {**there, **({name: self.sibling[name]} if name in self.sibling else {})}
        name = rng.choice(names)
        return {**self.files, name: self.spoil(name, self.files[name], rng, name in self.by_field)}

    def with_special(self, number: int) -> Files:
        """The files with the `number`-th combination of a name and something that is no file."""
        name = self.special_names()[number // len(SPECIAL)]
        return {**self.files, name: SPECIAL[number % len(SPECIAL)]}

    def special_names(self) -> list[str]:
        """One file of every name: of the runs of a study, those of the first."""
        first: dict[str, str] = {}
        for name in sorted(self.files.keys() - set(self.spared)) if self.special else ():
            first.setdefault(Path(name).name, name)
        return list(first.values())


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def put(files: Files, folder: Path) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, Special):
            data.make(folder / name)
        else:
            (folder / name).write_bytes(data)
    return folder


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


# Data sets


def write_dataset(folder: Path, kind: str) -> Path:
    rng = np.random.default_rng(3)
    more: dict[str, Any] = {"shape": (WORDS,)} if kind == "sparse" else {"shape": (3, 2)}
    more |= {"kind": "sparse" if kind == "sparse" else "dense", "logged": kind == "logged"}
    with DatasetWriter(
        folder, name="d", actions="abcde", multilabel=kind != "logged", **more
    ) as writer:
        for client in range(12):
            for row in range(4):
                words = np.sort(rng.choice(WORDS, 5, replace=False))
                x = (words, rng.random(5)) if kind == "sparse" else rng.random((3, 2))
                if kind == "logged":
                    log = {"action": int(rng.integers(ACTIONS)), "reward": 1.0, "propensity": 0.5}
                    add_example(writer, f"c{client:02d}", x, available=range(ACTIONS), **log)
                else:
                    labels = rng.choice(ACTIONS, 1 + row % 2, replace=False)
                    add_example(
                        writer,
                        f"c{client:02d}",
                        x,
                        labels,
                        split="test" if client % 5 == 0 and row == 3 else "train",
                    )
        return writer.finish()


def run_rounds(folder: Path) -> Any:
    """Open it, and where it has labels run two rounds with it."""
    from fedbandit.simulation import simulate

    dataset = FederatedDataset.open(folder)
    if dataset.header.logged:
        return str([float(dataset.train.log.rewards.sum()), float(np.sum(dataset.train.features))])
    settings = {"scenario": "scratch", "rounds": 2, "clients_per_round": 8, "deploy_every": 1}
    config = Config.build(
        {**settings, "threads": 1, "evaluate_every": 1, "client": {"learning_rate": 0.1}}
    )
    return str(list(simulate(config, dataset)))


def run_signed(folder: Path) -> Any:
    """The same with checksums that are right, so that only types, shapes and ranges speak."""
    return run_rounds(with_checksums(folder))


def data_sets() -> Iterator[tuple[str, Kind]]:
    for kind in ("sparse", "dense", "logged"):
        with scratch() as folder:
            yield (
                f"data set, {kind}",
                Kind(contents(write_dataset(folder / "d", kind)), run_rounds, checked=True),
            )
        with scratch() as folder:
            files = contents(write_dataset(folder / "d", kind))
            yield f"data set, signed, {kind}", Kind(files, run_signed, spared=("checksums.json",))


# Runs


def the_dataset() -> FederatedDataset:
    from builders import random_text

    return random_text()


def resumed(config: Config) -> Callable[[Path], Any]:
    """Resume a stopped run: the rounds that it runs now must be those that it would have run."""

    def use(folder: Path) -> Any:
        from fedbandit.runs.run import execute

        execute(config, folder, dataset=the_dataset())
        return (folder / "metrics.jsonl").read_text().splitlines()[5:]

    return use


def read_everywhere(folder: Path) -> Any:
    """What `report`, `watch` and `Results` make of the runs in a folder; one bad folder costs none of the others."""
    from fedbandit.report.report import write_report
    from fedbandit.report.watch import Watcher
    from fedbandit.results import Results

    watcher = Watcher(folder)
    for _ in range(2):
        assert any(row["name"] == "good" for row in watcher.now()["runs"]), (
            "the good run is not shown"
        )
    write_report([folder], folder / "report.html")
    results = Results.open(folder)
    results.summary()
    return len(results.to_pandas()) > 0


def runs() -> Iterator[tuple[str, Kind]]:
    from fedbandit.runs.run import execute

    for name, more in (("fedavg", {}), ("scaffold", {"algorithm__name": "scaffold"})):
        config = small_config(rounds=6, deploy_every=2, threads=1, **more)
        with scratch() as folder:
            execute(config, folder / "r", dataset=the_dataset(), until=3)
            execute(config, folder / "r", dataset=the_dataset(), until=4)
            if name == "scaffold":
                sqlite3.connect(folder / "r" / "memory.sqlite").execute(
                    "PRAGMA wal_checkpoint(TRUNCATE)"
                )
            files = {
                n: d
                for n, d in contents(folder / "r").items()
                if not n.endswith((".lock", "-shm", "-wal"))
            }
        # Timings have no checksum; what is computed from now on does not depend on them.
        yield f"stopped run, {name}", Kind(files, resumed(config), checked=True)
        checkpoint = max(n for n in files if n.startswith("checkpoints"))
        with scratch() as folder:
            other = config.with_values({"seed": 1})
            execute(other, folder / "r", dataset=the_dataset(), until=4)
            sibling = contents(folder / "r")
        yield (
            f"stopped run beside a sibling, {name}",
            Kind(files, resumed(config), checked=True, sibling=sibling, special=True),
        )
        others = tuple(n for n in files if not n.startswith("checkpoints"))
        yield (
            f"stopped run signed anew, {name}",
            Kind(files, resumed(config), spoil=signed, spared=others),
        )

        def load(folder: Path, checkpoint: str = checkpoint) -> Any:
            state = load_state(folder / checkpoint)
            kept = [array for _, array in sorted(state.server_state.items())]
            parts = [
                state.weights,
                *kept,
                *(version.weights for _, version in sorted(state.deployed.items())),
            ]
            digest = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
            return (
                digest,
                state.round,
                state.clip_norm,
                state.reward_total,
                state.events,
                state.extra,
            )

        yield f"checkpoint, {name}", Kind({checkpoint: files[checkpoint]}, load, checked=True)
        yield (
            f"checkpoint signed anew, {name}",
            Kind({checkpoint: files[checkpoint]}, load, spoil=signed),
        )
    with scratch() as folder:
        for name in ("bad", "good"):
            execute(
                small_config(rounds=5, seed=len(name), threads=1),
                folder / name,
                dataset=the_dataset(),
            )
        files = {
            n: d for n, d in contents(folder).items() if not n.endswith((".lock", ".safetensors"))
        }
        spared = tuple(n for n in files if n.startswith("good"))
    yield "finished run", Kind(files, read_everywhere, spared=spared, takes_long=True)


def signed(name: str, data: bytes, rng: Any, fields_only: bool) -> bytes:
    return signed_anew(data, rng)


# Devices


def used_agent(folder: Path) -> Any:
    """Let an app act with the folder and the server train on it; whatever is wrong is said, never raised."""
    rng = np.random.default_rng(5)
    with Agent(folder, uniform=rng.random) as agent:
        decision = agent.choose(rng.random(7).astype(np.float32))
        assert np.isfinite(decision.propensity)
        agent.reward(decision.event_id, 1.0)
        participant = Participant(agent)
        facts, arrays = request_of(folder)
        said, sent = participant.answer("train", facts, arrays)
        check_sound(said, sent)
        return {k: v for k, v in said.items() if k not in ("problem",)}, "problem" in said


def check_sound(said: dict[str, Any], sent: dict[str, np.ndarray]) -> None:
    json.dumps(said, allow_nan=False)
    assert all(np.isfinite(array).all() for array in sent.values()), "an update that is not finite"


def request_of(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return json.loads((folder / "request.json").read_bytes()), {
        "weights": np.load(folder / "weights.npy")
    }


def a_device(folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files of a device that has acted and trained, and the requests that it followed."""
    given = values(min_reports=1)
    given["gate"] = {"confidence": 0.5, "limit": 10.0, "clients": 3}
    given["deploy_every"] = 1
    network, deployment = Network(devices(folder, 3)), a_deployment(folder, given)
    settle(deployment, network.participants)
    server = coordinator(deployment, network)
    server.attempt()
    for participant in network.participants.values():
        live(participant)
    server.attempt()
    for participant in network.participants.values():
        participant.agent.close()
    first = network.participants[100].agent.folder
    with sqlite3.connect(first / "events.sqlite") as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    files = {n: d for n, d in contents(first).items() if not n.endswith(("-wal", "-shm", ".lock"))}
    requests = {request.kind: request for request in network.sent if request.node == 100}
    train = requests["train"]
    files["request.json"] = json.dumps(train.facts).encode()
    files["weights.npy"] = to_npy(train.arrays["weights"])
    return files, requests


def device_kinds() -> Iterator[tuple[str, Kind]]:
    with scratch() as folder:
        files, requests = a_device(folder)
    own = tuple(files)
    message = ("request.json", "weights.npy")
    newest = max(n for n in own if n.startswith("models/model-"))
    for what, names in (("device log", ["events.sqlite"]), ("device card", ["device.json"])):
        yield what, Kind(files, used_agent, spared=tuple(n for n in own if n not in names))
    models = [n for n in own if n.startswith("models/")]
    yield (
        "models on a device",
        Kind(files, used_agent, spared=tuple(n for n in own if n not in models)),
    )

    def installed(folder: Path) -> Any:
        payload = (folder / "model.safetensors").read_bytes()
        rng = np.random.default_rng(5)
        with scratch() as inner, Agent(inner / "agent", uniform=rng.random) as agent:
            agent.install(payload)
            chosen = [agent.choose(rng.random(7).astype(np.float32)).propensity for _ in range(3)]
            weights = {name: array.tobytes() for name, array in sorted(agent.model.weights.items())}
            return chosen, weights, agent.model.version, agent.model.actions, str(agent.policy)

    model = {"model.safetensors": files[newest]}
    yield "model file", Kind(model, installed, checked=True)
    yield "model file signed anew", Kind(model, installed, spoil=signed)

    def answers(kind: str) -> Callable[[Path], Any]:
        def use(folder: Path) -> Any:
            facts = json.loads((folder / "facts.json").read_bytes())
            if not isinstance(facts, dict):
                raise DataError("refused by the transport")
            arrays = {p.stem: np.load(p) for p in sorted(folder.glob("*.npy"))}
            with Agent(folder / "device", uniform=np.random.default_rng(5).random) as agent:
                said, sent = Participant(agent).answer(kind, facts, arrays)
            check_sound(said, sent)

        return use

    for kind, request in requests.items():
        there = {f"device/{n}": d for n, d in files.items() if n not in message}
        arrays = {f"{n}.npy": to_npy(a) for n, a in request.arrays.items()}
        told = {"facts.json": json.dumps(dict(request.facts)).encode(), **arrays, **there}
        yield (
            f"server's message, {kind}",
            Kind(told, answers(kind), spared=tuple(there), by_field=tuple(told)),
        )


def report_kinds() -> Iterator[tuple[str, Kind]]:
    """Whatever a device answers, the round ends with sound figures or is refused, and the server goes on."""
    root = Path(tempfile.mkdtemp())
    given = values()
    network, deployment = Network(devices(root, 3)), a_deployment(root, given)
    settle(deployment, network.participants)
    coordinator(deployment, network).attempt()
    reply = next(r for r in network.received if "trained" in r.facts)
    facts = {
        "facts.json": json.dumps(dict(reply.facts)).encode(),
        "update.npy": to_npy(reply.arrays["update"]),
    }
    for participant in network.participants.values():
        participant.agent.close()
    before = root / "before"
    before.mkdir()
    for path in list(root.iterdir()):
        if path != before:
            path.rename(before / path.name)

    def use(folder: Path) -> Any:
        said = json.loads((folder / "facts.json").read_bytes())
        update = np.load(folder / "update.npy")
        shutil.copytree(before, folder / "world")
        inner = Network(devices(folder / "world", 3))
        token = reply.facts["token"]

        def lie(request: Any, honest: Reply) -> list[Reply]:
            now = (
                {k: request.facts["token"] if v == token else v for k, v in said.items()}
                if isinstance(said, dict)
                else {}
            )
            return [replace(honest, facts=now, arrays={"update": update})]

        inner.faults[100] = lie
        server = coordinator(a_deployment(folder / "world", given), inner)
        metrics = server.attempt()
        for participant in inner.participants.values():
            participant.agent.close()
        assert metrics is not None, "one device's report ended the round for all"
        json.dumps(metrics, allow_nan=False)
        assert np.isfinite(server.state.weights).all()
        assert float(np.linalg.norm(server.state.weights - deployment.initial)) < 10

    yield "device's report", Kind(facts, use, by_field=tuple(facts))


def flower_kinds() -> Iterator[tuple[str, Kind]]:
    try:
        from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
    except ImportError:
        return

    from fedbandit.deploy.flower.transport import from_records

    def use(folder: Path) -> Any:
        text = (folder / "facts.json").read_bytes().decode("utf-8", "replace")
        said = json.loads((folder / "array.json").read_bytes())
        try:  # Flower's own types refuse some of it, before we see it
            array = Array(
                said["dtype"], tuple(said["shape"]), said["stype"], (folder / "data").read_bytes()
            )
            content = RecordDict(
                {"facts": ConfigRecord({"json": text}), "arrays": ArrayRecord({"update": array})}
            )
        except Exception as error:
            raise DataError(
                str(error).splitlines()[0] if str(error) else "refused by Flower"
            ) from None
        from_records(content)

    array = Array(np.arange(24, dtype=np.float32))
    told = json.dumps(
        {"dtype": array.dtype, "shape": list(array.shape), "stype": array.stype}
    ).encode()
    files = {"facts.json": b'{"token": "t"}', "array.json": told, "data": array.data}
    yield "Flower's records", Kind(files, use, by_field=("array.json",))


# Configurations


def config_kinds() -> Iterator[tuple[str, Kind]]:
    def built(folder: Path) -> Any:
        from fedbandit.assembly.experiment import build_experiment

        build_experiment(Config.build(read_toml(folder / "config.toml")), the_dataset())

    config = small_config(
        clipping__norm=1.0, drift__at=[3], gate__confidence=0.9, population__cache_size=10
    )
    yield "configuration", Kind({"config.toml": config.to_toml().encode()}, built)

    def deployed(folder: Path) -> Any:
        from fedbandit.deploy.server.deployment import read_deployment

        read_deployment(folder / "deployment.toml")

    import tomli_w

    given = values(vocabulary="words.txt", population=100)
    del given["deployment"]["shape"]
    files = {
        "deployment.toml": tomli_w.dumps(given).encode(),
        "words.txt": b"the\ncat\nsat\non\na\nmat\n",
    }
    yield "deployment", Kind(files, deployed)


# Sources


def imported(function: Callable[..., Any], name: str, *arguments: Any) -> Callable[[Path], Any]:
    def use(folder: Path) -> Any:
        with scratch() as out:
            with importing(out / "d"):
                function(
                    folder / name, out / "d", *(a(folder) if callable(a) else a for a in arguments)
                )
            run_rounds_of_any(out / "d")

    return use


def run_rounds_of_any(folder: Path) -> None:
    dataset = FederatedDataset.open(folder, verify=True)
    if (
        not dataset.header.logged
        and dataset.train.num_clients >= 8
        and dataset.header.kind == "sparse"
    ):
        run_rounds(folder)


def source_kinds() -> Iterator[tuple[str, Kind]]:
    from fedbandit.data.importers.arrays import ArrayOptions, import_arrays
    from fedbandit.data.importers.images import import_emnist, import_leaf
    from fedbandit.data.importers.stackexchange import (
        StackExchangeOptions,
        StackOverflowOptions,
        import_stackexchange,
        import_stackoverflow,
    )
    from fedbandit.data.importers.tables import LoggedOptions, TableOptions, import_table

    rng = np.random.default_rng(1)
    file = io.BytesIO()
    images = rng.integers(0, 256, (24, 6, 6), np.uint8)
    np.savez_compressed(file, images=images, labels=np.arange(24) % 5, writers=np.arange(24) % 4)
    options: Any = ArrayOptions(features="images", labels="labels", clients="writers")
    yield "npz", Kind({"a.npz": file.getvalue()}, imported(import_arrays, "a.npz", options))
    with scratch() as folder:
        path = write_sqlite(folder / "emnist_all.sqlite", emnist_rows())
        plain, packed = path.read_bytes(), pack(path).read_bytes()
    use = imported(import_emnist, "emnist_all.sqlite")
    yield "EMNIST", Kind({"emnist_all.sqlite": plain}, use)
    yield (
        "EMNIST, packed",
        Kind({"e.sqlite.lzma": packed}, imported(import_emnist, "e.sqlite.lzma")),
    )
    rows = [
        (
            "test" if user % 4 == 0 and row == 0 else "train",
            f"{user:04d}",
            sentence(f"word{row} cat", "a title", tags),
        )
        for user in range(10)
        for row, tags in enumerate(("python|java", "c++", "java"))
    ]
    with scratch() as folder:
        write_sqlite(folder / "stackoverflow.sqlite", rows)
        write_counts(
            folder,
            {"word0": 9, "word1": 8, "cat": 5, "title": 3},
            {"java": 9, "python": 7, "c++": 3},
        )
        files = contents(folder)
    options = StackOverflowOptions(vocabulary=4, actions=3)
    counts = [
        lambda folder: folder / "stackoverflow.word_count",
        lambda folder: folder / "stackoverflow.tag_count",
    ]
    use = imported(import_stackoverflow, "stackoverflow.sqlite", *counts, options)
    yield "Stack Overflow", Kind(files, use)
    user = {"x": (images[:3].reshape(3, 36) / 255).tolist(), "y": [1, 2, 3]}
    user["x"] = [[*row, *([1.0] * (784 - 36))] for row in user["x"]]
    leaf = {"users": ["u1", "u2"], "num_samples": [3, 3], "user_data": {"u1": user, "u2": user}}
    use = imported(lambda path, out: import_leaf(path, out), ".")
    yield "LEAF", Kind({"train/all.json": json.dumps(leaf).encode()}, use)
    posts = "\n".join(
        f'  <row Id="{i}" PostTypeId="1" OwnerUserId="{i % 9}" Title="what is {i % 5}"'
        f' Body="&lt;p&gt;a cat {i}&lt;/p&gt;" Tags="&lt;t{i % 3}&gt;&lt;t{i % 2}&gt;" />'
        for i in range(40)
    )
    text = f'<?xml version="1.0" encoding="utf-8"?>\n<posts>\n{posts}\n</posts>'.encode()
    options = StackExchangeOptions(vocabulary=10, actions=3)
    yield (
        "Stack Exchange",
        Kind({"Posts.xml": text}, imported(import_stackexchange, "Posts.xml", options)),
    )
    yield from _tables(TableOptions, LoggedOptions, import_table)


def _tables(options: Any, logged_options: Any, import_table: Any) -> Iterator[tuple[str, Kind]]:
    import pandas as pd

    rng = np.random.default_rng(2)
    users = [f"u{i % 10}" for i in range(40)]
    table = pd.DataFrame(
        {
            "user": users,
            "title": [f"word{i % 7} noise" for i in range(40)],
            "tags": ["a|b", "b"] * 20,
        }
    )
    logged = pd.DataFrame(
        {
            "user": users,
            **{f"x{k}": rng.random(40).round(3) for k in range(3)},
            "action": [f"a{i % 3}" for i in range(40)],
            "reward": rng.random(40).round(3),
            "p": 0.25,
        }
    )
    text = options(client="user", labels="tags", text=["title"], vocabulary=9, actions=2)
    log = logged_options(
        client="user", action="action", reward="reward", propensity="p", features=["x*"]
    )
    for name, frame, chosen in (
        ("table", table, text),
        ("logged table", logged, log),
    ):
        yield (
            f"{name}, CSV",
            Kind(
                {"t.csv": frame.to_csv(index=False).encode()},
                imported(import_table, "t.csv", chosen),
            ),
        )
        file = io.BytesIO()
        frame.to_parquet(file)
        yield (
            f"{name}, Parquet",
            Kind({"t.parquet": file.getvalue()}, imported(import_table, "t.parquet", chosen)),
        )


def all_kinds(special: bool = False) -> dict[str, Kind]:
    """Every kind by its name, or those in which something that is no file may stand; it takes some seconds."""
    from fuzz_studies import study_kinds

    folders = (runs, study_kinds)
    others = (data_sets, device_kinds, report_kinds, flower_kinds, config_kinds, source_kinds)
    made = {
        name: kind
        for make in (*folders, *others[: 0 if special else None])
        for name, kind in make()
    }
    return {name: kind for name, kind in made.items() if kind.special or not special}
