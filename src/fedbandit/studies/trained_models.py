"""Trained models: read from a run folder or a model file, scored with, and written for apps.

Three formats: safetensors for `fedbandit.deploy.Agent`, ONNX for other runtimes, JSON for linear
models anywhere.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbandit.acting import Predictor
from fedbandit.assembly.experiment import build_experiment
from fedbandit.assembly.parts import acting_model_of
from fedbandit.config import Config, read_toml
from fedbandit.core.contexts import Contexts
from fedbandit.core.errors import ConfigError, DataError, refuse
from fedbandit.core.files import read_json, read_packed, to_json, write_bytes
from fedbandit.core.identity import file_digests, require_run, run_in
from fedbandit.core.parts import require_trust
from fedbandit.core.prediction import Prediction
from fedbandit.data import open_dataset
from fedbandit.data.dataset import FederatedDataset, Header, Split
from fedbandit.deploy.device.model_files import DeviceModel
from fedbandit.evaluation.logs import RowPredictions, RowScores
from fedbandit.federated.learners.make_learner import Trainable
from fedbandit.federated.state import State, load_marked
from fedbandit.models import DataSpec
from fedbandit.policies import describe, make_policy
from fedbandit.runs.folder import checkpoints

Format = Literal["safetensors", "onnx", "json"]
_SMALLEST_NORM = 1e-12  # what a dense context's length is divided by at least


@dataclass(frozen=True)
class Scorer:
    """Flat weights, and the predictor that scores with them."""

    predictor: Predictor
    weights: np.ndarray
    trained_on: str | None = None  # where it is known

    def predict(self, contexts: Contexts) -> Prediction:
        """Predictions for every action of each context."""
        return self.predictor.predict(self.weights, contexts)

    def on(self, split: Split) -> RowPredictions:
        """Predictions for rows of a split, as a function of the rows [n]."""
        return lambda rows: self.predict(split.contexts(rows))

    def rewards_on(self, split: Split) -> RowScores:
        """The model's scores taken for rewards."""
        return lambda rows: self.predict(split.contexts(rows)).mean


def trained_on(dataset: FederatedDataset) -> str | None:
    """The mark of the data set's training split in models trained on it; None without a fingerprint."""
    return f"{dataset.header.fingerprint}:train" if dataset.header.fingerprint else None


def load_scorer(path: Path | str, header: Header) -> Scorer:
    """The newest training model of a run folder, or a model file (.safetensors), for data of this
    header.
    """
    return (_from_run if Path(path).is_dir() else _from_file)(Path(path), header)


def newest_state(run: Path) -> State:
    """The newest checkpoint of a run, with the flat weights of the training model."""
    kept = checkpoints(run)
    refuse((not kept, f"{run}: the run has no checkpoint yet"), error=DataError)
    state, marks = load_marked(kept[0])
    require_run(kept[0], marks.get("run"), run_in(run))
    return state


def config_of_run(path: Path) -> Config:
    """The configuration of a run folder, which may have come from elsewhere: code that it names
    must be trusted.
    """
    refuse(
        (
            not (path / "config.toml").exists(),
            f"{path}: neither a run folder nor a model file: no config.toml",
        ),
        error=DataError,
    )
    config = Config.build(read_toml(path / "config.toml"), where=f"{path / 'config.toml'}: ")
    require_trust(config.part_names(), str(path))
    return config


def _from_run(path: Path, header: Header) -> Scorer:
    """The newest training model of a run, for data of this header."""
    config, environment = config_of_run(path), read_json(path / "environment.json") or {}
    fingerprint = environment.get("data_fingerprint")
    seen = f"{fingerprint}:train" if fingerprint else None
    weights = newest_state(path).weights
    files = environment.get("files")
    acting = acting_model_of(config, DataSpec.of(header))
    return _scorer(path, header, acting, weights, seen, files)


def _from_file(path: Path, header: Header) -> Scorer:
    """The model of a file, which must fit the header's contexts, actions and columns."""
    model = _model_file(path)
    refuse(
        (
            (model.kind, model.shape) != (header.kind, header.shape)
            or model.actions != header.actions,
            f"{path}: made for other contexts or other actions than {header.name} has",
        ),
        (
            model.encoder != header.encoder,
            f"{path}: made for other columns than {header.name} has; import the data with --like",
        ),
        error=DataError,
    )
    require_trust([model.model["name"]], str(path))
    acting = Trainable.of(model.model, DataSpec.of(header))
    return _scorer(path, header, acting, dict(model.weights), model.trained_on)


def _model_file(path: Path) -> DeviceModel:
    """The model of a file, which is read only where it is a file of the size that it says."""
    try:
        return DeviceModel.from_bytes(read_packed(path), str(path))
    except OSError as error:
        reason = f"neither a run folder nor a model file: {error.strerror}"
    except ValueError as error:
        reason = f"not a fedbandit model: {error}"
    raise DataError(f"{path}: {reason}")


def _scorer(
    path: Path,
    header: Header,
    acting: Trainable,
    weights: np.ndarray | dict[str, np.ndarray],
    seen: str | None,
    files: Mapping[str, str] | None = None,
) -> Scorer:
    """Check that weights fit the model and the data, and that files it read are the same."""
    for file, digest in file_digests([acting.model] if files is not None else []).items():
        refuse(
            (
                files is not None and files.get(file) != digest,
                f"{path}: {file} has changed since the model was trained; put it back",
            ),
            error=DataError,
        )
    layout = acting.layout
    if isinstance(weights, dict):
        refuse(
            (
                {key: array.shape for key, array in weights.items()} != dict(layout.shapes),
                f"{path}: the arrays are not those of a {acting.described['name']} model for"
                f" {header.name}",
            ),
            error=DataError,
        )
        weights = layout.flatten(weights, next(iter(weights.values())).dtype)
    refuse(
        (
            layout.size != len(weights),
            f"{path}: the model has {len(weights)} weights; {header.name} needs {layout.size}",
        ),
        error=DataError,
    )
    return Scorer(acting.predictor(), weights, seen)


def export(
    run: Path | str,
    out: Path | str,
    *,
    format: Format | None = None,
    policy: Mapping[str, Any] | None = None,
    dataset: FederatedDataset | None = None,
    catalogue: bool = True,
    version: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the trained model of a run, or of a model file, to a file of its own; returns its path.

    `format` is `safetensors` (for `fedbandit.deploy.Agent`), `onnx` (linear models, MLPs and the
    CNN) or `json` (linear models); without it the name's ending decides. The file says how to
    explore: with the run's rule at its newest round, or with the `policy` that is given, a name
    with parameters. `dataset` is the run's data where it lies elsewhere now. Over candidates the
    file carries the items' features unless `catalogue` is false. `version` is the model's number on
    devices; without it, the number of rounds that trained it.

    Examples:
        >>> import tempfile
        >>> from fedbandit import Agent, preset, run
        >>> config = preset("so-scratch-softmax").with_values({"rounds": 2, "clients_per_round": 4})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trained = run(config, f"{folder}/run")
        ...     path = trained.export(f"{folder}/model.safetensors", policy={"name": "greedy"})
        ...     with Agent(f"{folder}/device") as agent:
        ...         installed = agent.install(path)
        ...         decision = agent.choose("how do I sort a list")
        >>> installed, decision.propensity
        (True, 1.0)
    """
    out, kind = Path(out), format or Path(out).suffix.removeprefix(".")
    writers = {"safetensors": DeviceModel.to_bytes, "onnx": to_onnx, "json": to_linear_json}
    refuse(
        (kind not in writers, f"format: {kind or 'nothing'!r} is none of {', '.join(writers)}"),
        (
            out.exists() and not overwrite,
            f"{out}: already exists; use another name, or --force to overwrite it",
        ),
    )
    model = load_model(run, dataset, catalogue)
    if policy is not None:
        given = {key: value for key, value in policy.items() if key != "name"}
        model = replace(model, policy=describe(make_policy(str(policy.get("name")), given)))
    if version is not None:
        model = replace(model, version=version)
    payload = writers[kind](model)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, payload)
    return out


def load_model(
    source: Path | str, dataset: FederatedDataset | None = None, catalogue: bool = True
) -> DeviceModel:
    """The trained model of a run folder or of a model file, with the rule that belongs to it."""
    path = Path(source)
    if not path.is_dir():
        model = _model_file(path)
        return model if catalogue else replace(model, catalogue=None)
    config = config_of_run(path)
    dataset = dataset or open_dataset(config.data.source)
    fingerprint = (read_json(path / "environment.json") or {}).get("data_fingerprint")
    refuse(
        (
            fingerprint and dataset.header.fingerprint != fingerprint,
            f"{path}: was trained on other data than {dataset.header.name} is now",
        ),
        error=DataError,
    )
    experiment, state = build_experiment(config, dataset), newest_state(path)
    progress = experiment.bandit.progress(state.round, state.events)
    model = DeviceModel.of_experiment(
        experiment, state.weights, state.round, progress, catalogue=catalogue
    )
    return replace(model, trained_on=f"{fingerprint}:train" if fingerprint else None)


def to_linear_json(model: DeviceModel) -> bytes:
    """A linear model as JSON: everything of the file, weights as lists.

    Scores of a context x are x · weight + bias; dense contexts are scaled to length one first.
    """
    refuse(
        (
            model.model["name"] != "linear",
            f"format: json is for linear models, not {model.model['name']}",
        )
    )
    names = ("version", "kind", "shape", "actions", "policy", "model", "vocabulary")
    facts: dict[str, Any] = {name: getattr(model, name) for name in names}
    facts["encoder"] = None if model.encoder is None else model.encoder.to_json()
    if model.items is not None:
        facts["items"] = vars(model.items)
    weights = {name: np.asarray(array).tolist() for name, array in model.weights.items()}
    return (to_json({"format": "fedbandit-linear", **facts, **weights}) + "\n").encode()


# ONNX is a protobuf message. These few fields of it are written here, so that an export needs no
# package of its own: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto


def _number(value: int) -> bytes:
    """A varint: seven bits a byte, the lowest first.

    Examples:
        >>> _number(300).hex()
        'ac02'
    """
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _message(*fields: tuple[int, Any]) -> bytes:
    """Fields by number: whole numbers, texts, bytes of a message; None is left out.

    Examples:
        >>> _message((1, 150), (2, "ok"), (3, None)).hex()
        '08960112026f6b'
    """
    out = []
    for number, value in fields:
        if isinstance(value, int):
            out.append(_number(number << 3) + _number(value))
        elif value is not None:
            payload = value.encode() if isinstance(value, str) else bytes(value)
            out.append(_number(number << 3 | 2) + _number(len(payload)) + payload)
    return b"".join(out)


def _tensor(name: str, array: np.ndarray) -> bytes:
    """A constant: float32, or int64 where it holds whole numbers."""
    whole = array.dtype.kind == "i"
    values = array.astype("<i8" if whole else "<f4")
    dims = [(1, int(size)) for size in array.shape]
    return _message(*dims, (2, 7 if whole else 1), (8, name), (9, values.tobytes()))


def _value(name: str, shape: tuple[int, ...]) -> bytes:
    """A float32 input or output with any number of rows."""
    dims = [_message((2, "rows")), *(_message((1, size)) for size in shape)]
    tensor = _message((1, 1), (2, _message(*((1, dim) for dim in dims))))
    return _message((1, name), (2, _message((1, tensor))))


class _Graph:
    """Nodes in a row: each takes what the one before made."""

    def __init__(self) -> None:
        self.nodes: list[bytes] = []
        self.constants: list[bytes] = []
        self.last = "context"

    def constant(self, array: Any) -> str:
        """The name of a constant."""
        name = f"c{len(self.constants)}"
        self.constants.append(_tensor(name, np.asarray(array)))
        return name

    def add(self, kind: str, *more: str, keep: bool = True, **attributes: Any) -> str:
        """A node over the last result and others; `keep` makes its result the last one."""
        name = f"n{len(self.nodes)}"
        inputs = [(1, one) for one in (self.last, *more)]
        given = [(5, _attribute(key, value)) for key, value in attributes.items()]
        self.nodes.append(_message(*inputs, (2, name), (4, kind), *given))
        self.last = name if keep else self.last
        return name

    def layer(self, weight: np.ndarray, bias: np.ndarray) -> None:
        """Matrix product and bias."""
        self.add("MatMul", self.constant(weight))
        self.add("Add", self.constant(bias))


def _attribute(name: str, value: Any) -> bytes:
    """An attribute of a node: a whole number, or a list of them."""
    if isinstance(value, list):
        return _message((1, name), *((8, one) for one in value), (20, 7))
    return _message((1, name), (3, int(value)), (20, 2))


def to_onnx(model: DeviceModel) -> bytes:
    """A model as ONNX: input `context` float32 [rows, *shape], output `scores` [rows, actions].

    Sparse contexts (text, tables) are given as whole rows, one number for each feature. Names of
    the actions, policy and encoder are JSON texts among the metadata.
    """
    name, weights = model.model["name"], model.weights
    if name not in ("linear", "mlp", "cnn") or model.items is not None:
        kind = f"{name} over candidates" if model.items is not None else name
        raise ConfigError(f"format: onnx is for linear models, MLPs and the cnn, not {kind}")
    graph = _Graph()
    if name == "cnn":
        _convolve(graph, weights, model.shape)
    else:
        graph.add("Reshape", graph.constant(np.array([-1, prod(model.shape)])))
    if name == "linear":
        if model.kind == "dense":
            graph.add("Div", _length(graph))
        graph.layer(weights["weight"], weights["bias"])
    else:
        graph.layer(weights["dense1"], weights["dense1_bias"])
        graph.add("Relu")
        graph.layer(weights["dense2"], weights["dense2_bias"])
    graph.nodes.append(_message((1, graph.last), (2, "scores"), (4, "Identity")))
    made = _message(
        *((1, node) for node in graph.nodes),
        (2, "fedbandit"),
        *((5, constant) for constant in graph.constants),
        (11, _value("context", model.shape)),
        (12, _value("scores", (model.num_actions,))),
    )
    encoder = None if model.encoder is None else model.encoder.to_json()
    said = {"actions": model.actions, "policy": dict(model.policy), "encoder": encoder}
    said["vocabulary"] = model.vocabulary
    texts = [_message((1, key), (2, json.dumps(value))) for key, value in said.items()]
    opset, version = _message((2, 13)), model.version
    return _message(
        (1, 8), (2, "fedbandit"), (5, version), (7, made), (8, opset), *((14, t) for t in texts)
    )


def _length(graph: _Graph) -> str:
    """The length of each row, never less than the smallest that is divided by."""
    rows, graph.last = graph.last, graph.add("ReduceL2", keep=False, axes=[1], keepdims=1)
    length = graph.add("Max", graph.constant(np.float32(_SMALLEST_NORM)))
    graph.last = rows
    return length


def _convolve(graph: _Graph, weights: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> None:
    """The two convolutions of the CNN, each pooled: from images [rows, *shape] to flat rows."""
    height, width, channels = (*shape, 1)[:3]
    graph.add("Reshape", graph.constant(np.array([-1, height, width, channels])))
    graph.add("Transpose", perm=[0, 3, 1, 2])
    for layer in ("conv1", "conv2"):
        kernel = graph.constant(np.transpose(weights[layer], (3, 2, 0, 1)))
        graph.add("Conv", kernel, graph.constant(weights[f"{layer}_bias"]), pads=[2] * 4)
        graph.add("MaxPool", kernel_shape=[2, 2], strides=[2, 2])
        graph.add("Relu")
    graph.add("Transpose", perm=[0, 2, 3, 1])
    graph.add("Reshape", graph.constant(np.array([-1, (height // 4) * (width // 4) * 64])))
