"""Models on a device: one safetensors file per version with a small JSON inside, and a JSON that names the one in use.

A file is complete or not there; a reader never sees half an installation. Knows nothing of events or of servers.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.files import pack, unpack, write_bytes
from fedbandit.core.prediction import Progress
from fedbandit.core.process import alone_in
from fedbandit.data.encoder import Encoder
from fedbandit.deploy.device.device_identity import make_private, make_private_folder
from fedbandit.policies import describe, rule_at

if TYPE_CHECKING:
    from fedbandit.assembly.experiment import Experiment

FORMAT = "fedbandit-model"


FORMAT_VERSION = 1


LAST_VERSION = 2**53  # JSON readers everywhere agree up to here


_MOST_FEATURES = 2**31


_MOST_DIMENSIONS = 8


_DEEPEST = 4  # sections inside sections of a part's parameters


# Scores of a unit context are at most sqrt(features) times the largest weight; behind layers, sizes multiply.
_LARGEST = {"linear": 1e30, "linear-heads": 1e30}


_LARGEST_BEHIND_LAYERS = 1e6


Shapes = dict[str, tuple[int, ...]]


def read_model_file(payload: bytes, where: str) -> dict[str, Any]:
    """What a model file says, by the names of a `DeviceModel`'s fields."""
    try:
        weights, texts = unpack(payload)
        facts = json.loads(texts["model"])
    except Exception as error:  # whatever a stranger's bytes make a parser do
        raise DataError(f"{where}: not a fedbandit model: {error!r}"[:300]) from None
    if not isinstance(facts, dict):
        raise DataError(
            f"{where}: not a fedbandit model: a {type(facts).__name__} where facts were expected"
        )
    if facts.get("format") != FORMAT or facts.get("format_version") != FORMAT_VERSION:
        found = (facts.get("format"), facts.get("format_version"))
        raise DataError(
            f"{where}: format {str(found)[:100]}, this fedbandit reads {(FORMAT, FORMAT_VERSION)}"
        )
    if problem := _facts_problem(facts) or _weights_problem(weights, facts["model"]["name"]):
        raise DataError(f"{where}: damaged: {problem}")
    words = facts["vocabulary"]
    try:
        encoder = None if facts.get("encoder") is None else Encoder.from_json(facts["encoder"])
    except ValueError as error:
        raise DataError(f"{where}: damaged: {error}"[:300]) from None
    return {
        "encoder": encoder,
        **{name: facts[name] for name in ("version", "kind", "policy", "model")},
        "weights": weights,
        "actions": tuple(facts["actions"]),
        "shape": tuple(facts["shape"]),
        "vocabulary": None if words is None else tuple(words),
        "trained_on": facts["trained_on"] if isinstance(facts.get("trained_on"), str) else None,
    }


def is_version(value: object) -> bool:
    """Whether it can be the number of a model."""
    return type(value) is int and 0 <= value <= LAST_VERSION


def shapes_of(described: Mapping[str, Any], shape: tuple[int, ...], actions: int) -> Shapes | None:
    """The arrays of a built-in model, without making them; None for any other model, or if parameters are wrong."""
    name, features = described["name"], prod(shape)
    if name == "linear":
        return {"weight": (features, actions), "bias": (actions,)}
    if name == "linear-heads":
        return _of_heads(described.get("heads", 10), features, actions)
    if name == "mlp":
        hidden = described.get("hidden", 128)
        return (
            _layers({"dense1": (features, hidden), "dense2": (hidden, actions)})
            if type(hidden) is int
            else None
        )
    if name == "cnn" and len(shape) in (2, 3):
        height, width, channels = (*shape, 1)[:3]
        flat = (height // 4) * (width // 4) * 64
        convolutions = {"conv1": (5, 5, channels, 32), "conv2": (5, 5, 32, 64)}
        return _layers({**convolutions, "dense1": (flat, 512), "dense2": (512, actions)})
    return None


def _layers(shapes: Shapes) -> Shapes:
    return {
        key: value
        for name, s in shapes.items()
        for key, value in ((name, s), (f"{name}_bias", s[-1:]))
    }


def _of_heads(heads: object, features: int, actions: int) -> Shapes | None:
    if not (type(heads) is int and 2 <= heads <= 10_000):
        return None
    one: Shapes = {"weight": (features, actions), "bias": (actions,)}
    return {f"{name}{head}": shape for head in range(heads) for name, shape in one.items()}


def _facts_problem(facts: Mapping[str, Any]) -> str | None:
    """What is wrong with the first fact that is wrong."""
    for name in ("version", "kind", "policy", "model", "actions", "shape", "vocabulary"):
        if name not in facts:
            return f"{name}: missing"
    if not is_version(facts["version"]):
        return "version: not a whole number from 0 to 2**53"
    if facts["kind"] not in ("dense", "sparse"):
        return "kind: not dense or sparse"
    if not _is_shape(facts["shape"], facts["kind"]):
        return "shape: not a list of positive whole numbers, or too large"
    for name in ("actions", "vocabulary"):
        if facts[name] is None and name == "vocabulary":
            continue
        if not (
            isinstance(facts[name], list) and all(isinstance(word, str) for word in facts[name])
        ):
            return f"{name}: not a list of texts"
    for name in ("policy", "model"):
        if not (isinstance(facts[name], dict) and isinstance(facts[name].get("name"), str)):
            return f"{name}: not a section with a name"
        if not _is_plain(facts[name], _DEEPEST):
            return f"{name}: not made of plain finite values"
    return None


def _is_shape(shape: object, kind: str) -> bool:
    if not (
        isinstance(shape, list) and 1 <= len(shape) <= (1 if kind == "sparse" else _MOST_DIMENSIONS)
    ):
        return False
    return (
        all(type(n) is int and 1 <= n <= _MOST_FEATURES for n in shape)
        and prod(shape) <= _MOST_FEATURES
    )


def _is_plain(value: object, depth: int) -> bool:
    """Whether it is a text, a truth, a finite number, or lists and sections of these."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return abs(value) < 2**63 if isinstance(value, int) else isfinite(value)
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(part, depth - 1) for part in inner)
    return value is None or isinstance(value, str | bool)


def _weights_problem(weights: Mapping[str, np.ndarray], name: str) -> str | None:
    largest = _LARGEST.get(name, _LARGEST_BEHIND_LAYERS)
    for key, array in weights.items():
        if array.dtype not in (np.float32, np.float64):
            return f"{key[:50]}: {array.dtype} where float32 or float64 was expected"
        if (found := float(np.abs(array).max(initial=0))) > largest and isfinite(found):
            return f"{key[:50]}: {found:.4g} is too large; scores stay finite up to {largest:g}"
    return None


@dataclass(frozen=True)
class DeviceModel:
    """What a device needs to act: weights, what they are for, and the policy that explores with them."""

    version: int
    weights: Mapping[str, np.ndarray]
    actions: tuple[str, ...]
    kind: Literal["dense", "sparse"]
    shape: tuple[int, ...]  # of one context; for sparse ones (features,)
    policy: Mapping[str, Any]  # {"name": "softmax", "beta": 0.05}
    model: Mapping[str, Any] = field(
        default_factory=lambda: {"name": "linear"}
    )  # a name and its parameters
    vocabulary: tuple[str, ...] | None = None
    trained_on: str | None = (
        None  # the digest of the data and the split, where one data set was all of it
    )
    encoder: Encoder | None = (
        None  # how the columns of a table become a context; None: words alone, or features
    )

    def __post_init__(self) -> None:
        if self.version < 0:
            raise DataError(f"model version {self.version}: must not be negative")
        if len(self.actions) < 1 or len(set(self.actions)) != len(self.actions):
            raise DataError(
                f"model {self.version}: the names of the actions must be there and differ"
            )
        words = None if self.vocabulary is None else len(self.vocabulary)
        if self.encoder is not None:
            made = ("dense" if self.encoder.dense else "sparse", (self.encoder.width,))
            if made != (self.kind, self.shape) or self.encoder.words != (words or 0):
                raise DataError(
                    f"model {self.version}: its columns and words do not fit {self.kind} {self.shape}"
                )
        elif words is not None and (self.kind, self.shape) != ("sparse", (words,)):
            raise DataError(
                f"model {self.version}: {words} words do not fit {self.kind} {self.shape}"
            )
        for name, array in self.weights.items():
            if not np.isfinite(array).all():
                raise DataError(f"model {self.version}: {name} is not finite")
        if self.model["name"] in ("linear", "linear-heads"):  # devices score these themselves
            self._check_shapes()

    def _check_shapes(self) -> None:
        name, expected = self.model["name"], shapes_of(self.model, self.shape, len(self.actions))
        if expected is None:
            raise DataError(f"model {self.version}: {dict(self.model)} is not a {name} model")
        found = {name: tuple(array.shape) for name, array in self.weights.items()}
        if found != expected:
            raise DataError(
                f"model {self.version}: weights {found} where a {name} model has {expected}"[:1000]
            )

    @property
    def num_actions(self) -> int:
        return len(self.actions)

    @cached_property
    def word_index(self) -> dict[str, int] | None:
        return (
            None if self.vocabulary is None else {word: i for i, word in enumerate(self.vocabulary)}
        )

    @cached_property
    def space(self) -> str:
        """Names what contexts and actions mean; events of another space cannot train this model."""
        meaning: list[Any] = [self.kind, self.shape, self.actions, self.vocabulary]
        if self.encoder is not None:
            meaning.append(self.encoder.to_json())
        return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:16]

    def untrained(self, frozen: Iterable[str]) -> str:
        """Names all of the model that training leaves alone: its parts, and frozen weights."""
        found = hashlib.sha256(json.dumps(self.model, sort_keys=True).encode())
        for name in sorted(frozen):
            array = np.ascontiguousarray(self.weights[name])
            found.update(json.dumps([name, array.dtype.str, array.shape]).encode())
            found.update(array.tobytes())
        return found.hexdigest()[:32]

    def to_bytes(self) -> bytes:
        """The model as one safetensors file with a checksum."""
        facts = {name: getattr(self, name) for name in _FACTS}
        if self.trained_on is not None:
            facts["trained_on"] = self.trained_on
        if self.encoder is not None:
            facts["encoder"] = self.encoder.to_json()
        text = json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **facts})
        return pack(self.weights, {"model": text})

    @classmethod
    def from_bytes(cls, payload: bytes, where: str = "model") -> "DeviceModel":
        """Read what `to_bytes` made; anything else raises `DataError`."""
        return cls(**read_model_file(payload, where))

    @classmethod
    def of_experiment(
        cls,
        experiment: "Experiment",
        weights: np.ndarray,
        version: int,
        progress: Progress | None = None,
    ) -> "DeviceModel":
        """A simulation's flat weights as the model that devices act with, and the rule that belongs to the progress."""
        header, config = experiment.dataset.header, experiment.config
        if header.items is not None:
            raise DataError(f"{header.name}: devices do not act with candidates yet")
        policy = experiment.bandit.work.policy
        rule = rule_at(policy, progress or Progress(version=version, actions=header.num_actions))
        vocabulary = None
        has_words = header.kind == "sparse" if header.encoder is None else header.encoder.words > 0
        if has_words and experiment.dataset.path is not None:
            vocabulary = tuple(experiment.dataset.vocabulary())
        return cls(
            version=version,
            weights=experiment.layout.split(weights),
            actions=header.actions,
            kind=header.kind,
            shape=header.shape,
            policy=config.policy.model_dump() if rule is policy else describe(rule),
            model=config.model.described,
            vocabulary=vocabulary,
            encoder=header.encoder,
        )


_FACTS = ("version", "actions", "kind", "shape", "policy", "model", "vocabulary")


class ModelFiles:
    """The versions that a device keeps, newest installations first in mind: `install`, `use`, `load_current`."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = folder
        self.keep = max(1, keep)
        make_private_folder(folder)
        self._pointer = folder / "current.json"

    def stamp(self) -> tuple[int, int] | None:
        """Changes whenever another model comes into use; None before the first. Cheap enough for every decision."""
        try:
            status = self._pointer.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def versions(self) -> list[int]:
        """The versions on this device, ascending."""
        found = (
            path.stem.removeprefix("model-") for path in self.folder.glob("model-*.safetensors")
        )
        return sorted(int(number) for number in found if number.isascii() and number.isdigit())

    def current(self) -> dict[str, Any] | None:
        """Version and digest of the model in use; None before the first."""
        pointer = self._read_pointer()
        return None if pointer is None else {name: pointer[name] for name in ("version", "sha256")}

    def _read_pointer(self) -> dict[str, Any] | None:
        try:
            pointer = json.loads(self._pointer.read_text(encoding="utf-8"))
            if not (is_version(pointer["version"]) and isinstance(pointer["sha256"], str)):
                raise ValueError("no version and digest")
            if not isinstance(pointer["digests"], dict):
                raise ValueError("no digests by version")
            return dict(pointer)
        except FileNotFoundError:
            return None
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{self._pointer}: damaged ({str(error)[:100]}); install a model again"
            ) from None

    def install(self, payload: bytes, *, older: bool = False) -> bool:
        """Check a model, keep it and use it; an older one than that in use is left alone unless `older` is set."""
        model = DeviceModel.from_bytes(payload)
        with alone_in(self.folder):
            return self._install(model, payload, older)

    def _install(self, model: DeviceModel, payload: bytes, older: bool) -> bool:
        try:
            current = self.current()
        except DataError:  # damaged; to install a model is what mends it
            current = None
        if current is not None and model.version < current["version"] and not older:
            return False
        path, digest = self._path(model.version), hashlib.sha256(payload).hexdigest()
        try:
            kept = hashlib.sha256(path.read_bytes()).hexdigest()
        except FileNotFoundError:
            kept = None
        if current == {"version": model.version, "sha256": digest} and kept == digest:
            return False
        if (
            current is not None
            and current["version"] == model.version
            and current["sha256"] != digest
        ):
            raise DataError(
                f"model {model.version}: already in use with other weights; a new model needs a new version"
            )
        if kept != digest:
            self._write(path, payload)
        self._point_to(model.version, digest)
        return True

    def use(self, version: int) -> None:
        """Go back (or forward) to a version that is still on this device."""
        path = self._path(version)
        with alone_in(self.folder):
            try:
                payload = path.read_bytes()
            except FileNotFoundError:
                raise DataError(f"{path}: not on this device; it has {self.versions()}") from None
            DeviceModel.from_bytes(payload, str(path))
            self._point_to(version, hashlib.sha256(payload).hexdigest())

    def load_current(self) -> DeviceModel:
        """The model in use, checked against the digest under which it was installed."""
        while True:
            current = self.current()
            if current is None:
                raise DataError(f"{self.folder}: no model yet; install one first")
            path = self._path(current["version"])
            try:
                payload = path.read_bytes()
            except FileNotFoundError:
                if current == self.current():
                    raise DataError(f"{path}: missing; install a model again") from None
                continue  # newer versions came and this one was cleared away in between
            if hashlib.sha256(payload).hexdigest() != current["sha256"]:
                if current == self.current():
                    raise DataError(
                        f"{path}: damaged (its digest has changed); install a model again"
                    )
                continue
            return DeviceModel.from_bytes(payload, str(path))

    def load_previous(self) -> DeviceModel:
        """The newest older version on this device that still has the digest under which it was installed."""
        pointer = self._read_pointer()
        for version in reversed(self.versions()):
            if pointer is None or version >= pointer["version"]:
                continue
            try:
                payload = self._path(version).read_bytes()
                if hashlib.sha256(payload).hexdigest() == pointer["digests"].get(str(version)):
                    return DeviceModel.from_bytes(payload, str(self._path(version)))
            except (OSError, DataError):
                continue
        raise DataError(f"{self.folder}: no earlier model to act with; install one")

    def _path(self, version: int) -> Path:
        return self.folder / f"model-{version}.safetensors"

    def _point_to(self, version: int, digest: str) -> None:
        try:
            digests = (self._read_pointer() or {}).get("digests", {})
        except DataError:
            digests = {}
        there = self.versions()
        outdated = {other for other in there[: -self.keep] if other != version}
        kept = {
            str(other): digests[str(other)]
            for other in there
            if other not in outdated and str(other) in digests
        }
        pointer = {"version": version, "sha256": digest, "digests": {**kept, str(version): digest}}
        self._write(self._pointer, json.dumps(pointer).encode())
        for other in outdated:
            self._path(other).unlink(missing_ok=True)

    def _write(self, path: Path, payload: bytes) -> None:
        try:
            write_bytes(path, payload)
            make_private(path)
        except OSError as error:
            raise DataError(
                f"{path}: could not be written: {error.strerror}; the model in use stays"
            ) from None
