"""Small files in the layouts that a page of the documentation speaks of, so that its commands can be run."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
from messy_tables import write_decisions
from published import emnist_rows, image, pack, sentence, write_counts, write_sqlite
from pyarrow import csv, parquet


def files_of_importers(folder: Path) -> None:
    """One file for each importer of docs/data.md."""
    pack(write_sqlite(folder / "emnist_all.sqlite", emnist_rows()))
    sentences = [(split, f"u{i}", sentence("how to sort a list", "sorting", "python|java")) for i in range(4)
                 for split in ("train", "test")]  # fmt: skip
    pack(write_sqlite(folder / "stackoverflow.sqlite", sentences))
    write_counts(folder, {"how": 3, "sort": 2, "list": 1}, {"python": 2, "java": 1})
    _leaf(folder / "femnist" / "data")
    dump = folder / "beer.stackexchange.com"
    dump.mkdir()
    rows = [
        f'<row Id="{i}" PostTypeId="1" OwnerUserId="{i % 3}" Title="hops {i}" Tags="|ale|" Body="" />'
        for i in range(9)
    ]
    (dump / "Posts.xml").write_text(f"<posts>{''.join(rows)}</posts>", encoding="utf-8")
    _tables(folder)
    _decisions(folder)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 28, 28), np.uint8)
    np.savez(
        folder / "handwriting.npz",
        images=images,
        labels=np.arange(40) % 10,
        writers=np.arange(40) % 5,
    )


def _leaf(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        data = {"f0": {"x": [image(0, n) for n in range(3)], "y": [0, 1, 2]}}
        document = {"users": ["f0"], "num_samples": [3], "user_data": data}
        (folder / split / "all_0.json").write_text(json.dumps(document), encoding="utf-8")


def _tables(folder: Path) -> None:
    people = [f"p{i % 5}" for i in range(40)]
    numbers = {f"x_{k}": np.random.default_rng(k).random(40) for k in range(3)}
    choices = [("left", "right")[i % 2] for i in range(40)]
    questions = {
        "user_id": people,
        "title": [f"how to do thing {i}" for i in range(40)],
        "tags": ["a|b", "b"] * 20,
    }
    csv.write_csv(pa.table(questions), folder / "questions.csv")
    parquet.write_table(
        pa.table({"device": people, **numbers, "choice": choices}), folder / "clicks.parquet"
    )
    log = {
        "user": people,
        **numbers,
        "shown": choices,
        "clicked": np.arange(40) % 2.0,
        "p": np.full(40, 0.5),
    }
    parquet.write_table(
        pa.table({**log, "candidates": ["left|right"] * 40}), folder / "log.parquet"
    )


def state_of_a_server(folder: Path) -> None:
    """The folder of docs/deployment.md's server: a private deployment of four devices after three rounds."""
    from network_builders import Network, a_deployment, coordinator, devices, settle, values

    from fedbandit.deploy.server.server_status import Watch, facts_of

    given = values(state="state", population=5) | {
        "rounds": 500,
        "deploy_every": 1,
        "clients_per_round": 2,
        "privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0},
    }
    deployment = a_deployment(folder, given)
    network = Network(devices(folder, 4))
    settle(deployment, network.participants)
    watch = Watch(deployment.folder, facts_of(deployment))
    coordinator(deployment, network, watch=watch).run(attempts=3)


def _decisions(folder: Path) -> None:
    write_decisions(folder / "decisions.dsjson", rows=60)
    (folder / "campaign").mkdir()
    lines = [
        ",timestamp,item_id,position,click,propensity_score,user_feature_0,user_feature_1,user-item_affinity_0"
    ]
    lines += [
        f"{i},2019-11-24 00:00:00,{i % 3},{i % 2 + 1},{i % 2},0.3,u{i % 5},v{i % 4},0.0"
        for i in range(60)
    ]
    (folder / "campaign" / "all.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


MAKERS = {"data.md": files_of_importers, "deployment.md": state_of_a_server}
