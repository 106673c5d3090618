"""A trained model from a run folder or a model file, ready to score the contexts of a data set."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.acting import Predictor
from fedbandit.config import Config, read_toml
from fedbandit.core.contexts import Contexts
from fedbandit.core.errors import DataError
from fedbandit.core.files import read_json
from fedbandit.core.identity import file_digests, require_run, run_in
from fedbandit.core.prediction import Prediction
from fedbandit.data.dataset import FederatedDataset, Header, Split
from fedbandit.evaluation.ope.logs import RowPredictions, RowScores
from fedbandit.federated.learners.make_learner import Trainable
from fedbandit.federated.state import State, load_marked
from fedbandit.models import DataSpec
from fedbandit.runs.folder import checkpoints


@dataclass(frozen=True)
class Scorer:
    """Flat weights, and the predictor that scores with them."""

    predictor: Predictor
    weights: np.ndarray
    trained_on: str | None = None  # where it is known

    def predict(self, contexts: Contexts) -> Prediction:
        """What the model says about every action."""
        return self.predictor.predict(self.weights, contexts)

    def on(self, split: Split) -> RowPredictions:
        """What the model says about rows of a split."""
        return lambda rows: self.predict(split.contexts(rows))

    def rewards_on(self, split: Split) -> RowScores:
        """The model's scores taken for rewards."""
        return lambda rows: self.predict(split.contexts(rows)).mean


def trained_on(dataset: FederatedDataset) -> str | None:
    """What a model trained on the data set's training split remembers of it; None if the data has no fingerprint."""
    return f"{dataset.header.fingerprint}:train" if dataset.header.fingerprint else None


def load_scorer(path: Path | str, header: Header) -> Scorer:
    """The newest training model of a run folder, or a model file (.safetensors), for data of this header."""
    path = Path(path)
    if path.is_dir():
        return _from_run(path, header)
    return _from_file(path, header)


def newest_state(run: Path) -> State:
    """What a run has learned so far: its newest checkpoint, with the flat weights of the training model."""
    kept = checkpoints(run)
    if not kept:
        raise DataError(f"{run}: the run has no checkpoint yet")
    state, marks = load_marked(kept[0])
    require_run(kept[0], marks.get("run"), run_in(run))
    return state


def _from_run(path: Path, header: Header) -> Scorer:
    if not (path / "config.toml").exists():
        raise DataError(f"{path}: neither a run folder (no config.toml) nor a model file")
    config = Config.build(read_toml(path / "config.toml"), where=f"{path / 'config.toml'}: ")
    environment = read_json(path / "environment.json") or {}
    fingerprint = environment.get("data_fingerprint")
    seen = f"{fingerprint}:train" if fingerprint else None
    weights = newest_state(path).weights
    files = environment.get("files")
    return _scorer(path, header, config.model.described, weights, seen, files)


def _from_file(path: Path, header: Header) -> Scorer:
    from fedbandit.deploy.device.model_files import DeviceModel

    try:
        model = DeviceModel.from_bytes(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    if (model.kind, model.shape) != (header.kind, header.shape) or model.actions != header.actions:
        raise DataError(f"{path}: made for other contexts or other actions than {header.name} has")
    if model.encoder != header.encoder:
        raise DataError(
            f"{path}: made for other columns than {header.name} has; import the data with --like"
        )
    return _scorer(path, header, model.model, dict(model.weights), model.trained_on)


def _scorer(
    path: Path,
    header: Header,
    described: Mapping[str, Any],
    weights: np.ndarray | dict[str, np.ndarray],
    seen: str | None,
    files: Mapping[str, str] | None = None,
) -> Scorer:
    trainable = Trainable.of(described, DataSpec.of(header))
    for file, digest in file_digests([trainable.model] if files is not None else []).items():
        if files is not None and files.get(file) != digest:
            raise DataError(f"{path}: {file} has changed since the model was trained; put it back")
    layout = trainable.layout
    if isinstance(weights, dict):
        if {key: array.shape for key, array in weights.items()} != dict(layout.shapes):
            raise DataError(
                f"{path}: the arrays are not those of a {described['name']} model for {header.name}"
            )
        weights = layout.flatten(weights, next(iter(weights.values())).dtype)
    if layout.size != len(weights):
        raise DataError(
            f"{path}: the model has {len(weights)} weights; {header.name} needs {layout.size}"
        )
    return Scorer(trainable.predictor(), weights, seen)
