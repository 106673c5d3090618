"""A device's whole life, in a process of its own: act, log, train, judge and lend itself to a secure sum.

Run by the tests of light installations, with an interpreter that may have numpy, safetensors and pydantic alone.
Usage: python light_device.py FOLDER [PACKAGE_TO_BLOCK ...]; prints what it has loaded as JSON.
"""

import json
import sys
from pathlib import Path


class Blocked:
    """Makes packages look as if they were not installed."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def block(packages):
    sys.meta_path.insert(0, Blocked(packages))
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


def live(folder: Path) -> dict:
    import numpy as np

    from fedbandit.deploy import Agent, DeviceModel
    from fedbandit.deploy.device.participant import Participant
    from fedbandit.deploy.secure_sums import RANGE, STEP

    words, actions = ("how", "sort", "list", "python"), ("python", "sorting", "list")
    rng = np.random.default_rng(0)
    answers = {}
    for kind, shape in (("sparse", (len(words),)), ("dense", (2, 2))):
        weights = {
            "weight": rng.normal(size=(4, 3)).astype(np.float32),
            "bias": np.zeros(3, np.float32),
        }
        model = DeviceModel(
            version=1,
            weights=weights,
            actions=actions,
            kind=kind,
            shape=shape,
            policy={"name": "softmax", "beta": 0.5},
            vocabulary=words if kind == "sparse" else None,
        )
        with Agent(folder / kind, uniform=rng.random) as agent:
            assert agent.install(model)
            for i in range(20):
                context = " ".join(rng.choice(words, 3)) if kind == "sparse" else rng.random(shape)
                decision = agent.choose(context)
                assert decision.logged
                agent.reward(decision.event_id, float(decision.action == i % 3))
            flat = np.concatenate([weights["weight"].ravel(), weights["bias"]])
            learning = {
                "objective": "weighted-regression",
                "objective_parameters": {"scale": 0.1},
                "client": {"learning_rate": 0.1, "batch_size": 8, "epochs": 2},
                "dtype": "float32",
            }
            bounds = {"events": 100, "reward": 1.0}
            facts = {
                "token": "t", "space": model.space, "learning": learning, "clip_norm": 0.5, "counted": None,
                "version": 1, "bounds": bounds, "estimator": "dr", "limit": 10.0, "settled": [],
                "round": 1, "model": model.untrained(()), "rule": dict(model.policy),
            }  # fmt: skip
            participant = Participant(agent)
            trained, arrays = participant.answer("train", facts, {"weights": flat})
            assert trained["trained"], trained
            judged, _ = participant.answer("judge", facts, {"weights": flat + arrays["update"]})
            assert judged["events"] == 20, judged
            levels = participant.contribute(facts, {"weights": flat})
            refused, _ = participant.answer(
                "train",
                {**facts, "learning": {**learning, "objective": "my_module:Mine"}},
                {"weights": flat},
            )
            answers[kind] = {
                "update": arrays["update"].tolist(),
                "gain": judged["gain"],
                "vector": (levels * STEP - RANGE).tolist(),
                "refused": refused["problem"],
            }
    return answers


def hints(folder: Path) -> dict:
    """What is said of things that need an extra."""
    import numpy as np

    from fedbandit.core.errors import FedbanditError
    from fedbandit.deploy import Agent, DeviceModel

    found = {}
    try:
        from fedbandit import simulate  # noqa: F401
    except ImportError as error:
        found["simulate"] = str(error)
    cnn = DeviceModel(
        version=1,
        weights={"conv1": np.zeros(3, np.float32)},
        actions=("a", "b"),
        kind="dense",
        shape=(28, 28),
        policy={"name": "greedy"},
        model={"name": "cnn"},
    )
    with Agent(folder / "cnn") as agent:
        try:
            agent.install(cnn)
        except FedbanditError as error:
            found["cnn"] = str(error)
    return found


if __name__ == "__main__":
    block(set(sys.argv[2:]))
    said = {"answers": live(Path(sys.argv[1]))}
    files = {
        name.partition(".")[0]
        for name, module in sys.modules.items()
        if getattr(module, "__file__", None)
    }
    said["packages"] = sorted(files - set(sys.stdlib_module_names) - {"__main__"})
    said["fedbandit"] = sys.modules["fedbandit"].__file__
    said["hints"] = hints(Path(sys.argv[1]))
    print(json.dumps(said))
