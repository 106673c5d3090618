"""Models on a device: one safetensors file per version, with a small JSON inside.

A file is complete or not there; a reader never sees half an installation. Knows nothing of events
or of servers.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedbandit.core.contexts import Features, ItemSpec
from fedbandit.core.errors import DataError, FedbanditError, MissingExtra, first_problem, needing
from fedbandit.core.files import pack, read_packed, read_small, unpack, write_bytes
from fedbandit.core.prediction import Progress
from fedbandit.core.process import alone_in
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Catalogue
from fedbandit.data.encoder import Encoder
from fedbandit.data.text import BagOfWords
from fedbandit.deploy.private_files import make_private, make_private_folder
from fedbandit.models import DataSpec, Layout, Model, build_model
from fedbandit.policies import described_at

if TYPE_CHECKING:
    from fedbandit.assembly.experiment import Experiment

FORMAT, FORMAT_VERSION = "fedbandit-model", 1
LAST_VERSION = 2**53  # JSON readers everywhere agree up to here
_MOST_FEATURES = 2**31
_DEEPEST = 4  # sections inside sections of a part's parameters
# Scores of a unit context are at most sqrt(features) times the largest weight; behind layers, sizes
# multiply.
_LARGEST = dict.fromkeys(("linear", "linear-width", "linear-heads", "linear-statistics"), 1e30)
_LARGEST_BEHIND_LAYERS = 1e6
_CATALOGUE = "catalogue."  # begins the names of a catalogue's arrays, among those of the weights


def _is_plain(value: object, depth: int = _DEEPEST) -> bool:
    """Whether it is a text, a truth, a finite number, or lists and sections of these."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return abs(value) < 2**63 if isinstance(value, int) else isfinite(value)
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(part, depth - 1) for part in inner)
    return value is None or isinstance(value, str | bool)


def _named_part(part: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(part.get("name"), str) or not _is_plain(part):
        raise ValueError("not a section with a name and plain finite values")
    return part


def _bounded(shape: tuple[int, ...]) -> tuple[int, ...]:
    if prod(shape) > _MOST_FEATURES:
        raise ValueError("too large")
    return shape


_Part = Annotated[dict[str, Any], AfterValidator(_named_part)]
_Size = Annotated[int, Field(ge=1, le=_MOST_FEATURES)]
_Shape = Annotated[tuple[_Size, ...], Field(min_length=1, max_length=8), AfterValidator(_bounded)]


class _ItemFacts(BaseModel):
    """The section of a model file about the candidates' features."""

    model_config = ConfigDict(strict=True, extra="forbid")
    kind: Literal["dense", "sparse"]
    shape: _Shape
    shown: float = Field(ge=1, allow_inf_nan=False)
    most: int = Field(ge=1)
    names: tuple[str, ...] | None = None  # of the catalogue; None: the file carries none
    encoder: Any = None
    vocabulary: tuple[str, ...] | None = None


class _Facts(BaseModel):
    """The JSON of a model file, beside its arrays; its defaults are those of optional facts."""

    model_config = ConfigDict(strict=True, extra="ignore")
    format: Literal["fedbandit-model"]
    format_version: Literal[1]
    version: int = Field(ge=0, le=LAST_VERSION)
    kind: Literal["dense", "sparse"]
    shape: _Shape
    actions: tuple[str, ...]
    vocabulary: tuple[str, ...] | None
    policy: _Part
    model: _Part
    trained_on: str | None = None
    encoder: Any = None
    items: _ItemFacts | None = None

    @classmethod
    def read(cls, text: str, where: str) -> "_Facts":
        """Checked facts; `DataError` says in one line what is wrong with the first that is
        wrong.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            said, found = first_problem(error), error.errors()[0]["loc"]
            what = "damaged" if found else "not a fedbandit model"
            if found and found[0] in ("format", "format_version"):
                what, said = "another format", f"this fedbandit reads {(FORMAT, FORMAT_VERSION)}"
            raise DataError(f"{where}: {what}: {said}"[:300]) from None


@dataclass(frozen=True)
class ItemCatalogue:
    """Items that a model file carries: their names, and their features in the same order.

    Apps then name candidates instead of sending features. Numbers of items are what a log holds,
    together with the digest of the catalogue that they belong to.

    Examples:
        >>> films = ItemCatalogue(("Alien", "Brazil"), np.eye(2, dtype=np.float32))
        >>> films.number("Brazil"), len(films)
        (1, 2)
    """

    names: tuple[str, ...]
    features: Features

    def __post_init__(self) -> None:
        if len(self.names) != len(self.features) or len(self._numbers) != len(self.names):
            raise DataError("catalogue: every item has one name of its own")

    def __len__(self) -> int:
        return len(self.names)

    def number(self, name: str) -> int | None:
        """The number of an item; None if the catalogue has no such name."""
        return self._numbers.get(name)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def digest(self) -> str:
        """Names the catalogue: of two with the same digest, an item's number means the same
        item.
        """
        found = hashlib.sha256(json.dumps(self.names).encode())
        for array in self.arrays().values():
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()[:16]

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays behind it, by name, as a model file holds them."""
        items = self.features
        if not isinstance(items, Ragged):
            return {"features": np.asarray(items, np.float32)}
        parts = {"offsets": items.offsets, "ids": items.ids, "values": items.values}
        return {name: np.asarray(array) for name, array in parts.items()}

    @classmethod
    def of_arrays(cls, names: tuple[str, ...], arrays: Mapping[str, np.ndarray]) -> "ItemCatalogue":
        """The inverse of `arrays`, from a file that may be a stranger's."""
        types = {name: (array.dtype.name, array.ndim) for name, array in arrays.items()}
        if types == {"offsets": ("int64", 1), "ids": ("int32", 1), "values": ("float32", 1)}:
            return cls(names, Ragged(arrays["offsets"], arrays["ids"], arrays["values"]))
        dense = arrays.get("features")
        if dense is None or len(arrays) > 1 or dense.dtype != np.float32 or not dense.ndim:
            raise DataError("catalogue: neither dense nor sparse features")
        return cls(names, dense)


def check_features(features: Features, kind: str, shape: tuple[int, ...]) -> None:
    """`DataError` where features are not finite rows of that kind and shape."""
    if isinstance(features, Ragged):
        fits, values = kind == "sparse" and _are_rows(features, shape[0]), features.values
    else:
        fits, values = kind == "dense" and features.shape[1:] == shape, features
    if not fits or not np.isfinite(np.asarray(values)).all():
        raise DataError(f"features are not finite, or not {kind} {shape}")


def _are_rows(features: Ragged, width: int) -> bool:
    """Whether offsets ascend over all ids and values, and no id is beyond the width."""
    offsets, ids, values = features.offsets, features.ids, np.asarray(features.values)
    if not len(offsets) or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        return False
    inside = not len(ids) or 0 <= ids.min() <= ids.max() < width
    return bool(inside and len(ids) == len(values) == offsets[-1])


@dataclass(frozen=True)
class DeviceModel:
    """A model as devices act with it: weights, what they are for, and the policy that explores with
    them.

    With `actions` it chooses among fixed ones. With `items` it chooses among candidates, by their
    features: then it has no actions, and may carry a `catalogue`. Weights are by name, as the model
    that `model` names has them: `weight` [features, K] and `bias` [K] of a linear one.

    Examples:
        >>> weights = {"weight": np.eye(2, dtype=np.float32), "bias": np.zeros(2, np.float32)}
        >>> policy = {"name": "softmax", "beta": 0.05}
        >>> model = DeviceModel(7, weights, ("tea", "coffee"), "dense", (2,), policy)
        >>> DeviceModel.from_bytes(model.to_bytes()).actions
        ('tea', 'coffee')
    """

    version: int
    weights: Mapping[str, np.ndarray]
    actions: tuple[str, ...]
    kind: Literal["dense", "sparse"]
    shape: tuple[int, ...]  # of one context; for sparse ones (features,)
    policy: Mapping[str, Any]  # {"name": "softmax", "beta": 0.05}
    model: Mapping[str, Any] = field(default_factory=lambda: {"name": "linear"})
    vocabulary: tuple[str, ...] | None = None
    trained_on: str | None = None  # the digest of data and split, where one data set was all of it
    encoder: Encoder | None = None  # of a table's columns; None: words alone, or features
    items: ItemSpec | None = None  # kind and shape of candidates' features
    item_encoder: Encoder | None = None  # of an item's columns; None: features
    item_vocabulary: tuple[str, ...] | None = None  # the words of its texts
    catalogue: ItemCatalogue | None = None

    def __post_init__(self) -> None:
        where = f"model {self.version}"
        if self.version < 0:
            raise DataError(f"model version {self.version}: must not be negative")
        if bool(self.actions) == (self.items is not None):
            raise DataError(f"{where}: the names of the actions must be there, or candidates")
        if len(set(self.actions)) != len(self.actions):
            raise DataError(f"{where}: the names of the actions must be there and differ")
        words = None if self.vocabulary is None else len(self.vocabulary)
        if self.encoder is not None:
            if _made_by(self.encoder) != (self.kind, self.shape) or self.encoder.words != (
                words or 0
            ):
                said = f"its columns and words do not fit {self.kind} {self.shape}"
                raise DataError(f"{where}: {said}")
        elif words is not None and (self.kind, self.shape) != ("sparse", (words,)):
            raise DataError(f"{where}: {words} words do not fit {self.kind} {self.shape}")
        self._check_items(where)
        for name, array in self.weights.items():
            if not np.isfinite(array).all():
                raise DataError(f"{where}: {name} is not finite")
        if self.model["name"] in _LARGEST:
            self.build()

    def build(self) -> tuple[Model, Layout]:
        """The model that it names, and how the weights lie; `DataError` where they do not fit it.

        Shapes of built-in models are compared before anything of their size is made.
        """
        where, name = f"model {self.version}", self.model["name"]
        parameters = {key: value for key, value in self.model.items() if key != "name"}
        try:
            network = build_model(name, self.data, parameters)
            if network.kernel not in ("sparse-linear", "dense-linear") and network.predict is None:
                with needing(f"the model {name}"):
                    import_module("torch")
            shapes = network.shapes
            if shapes is None:
                shapes = {key: tuple(array.shape) for key, array in network.init(0).items()}
        except MissingExtra:
            raise
        except FedbanditError as error:
            raise DataError(f"{where}: {error}") from None
        except Exception as error:  # a user's model may do anything with what a file names
            said = f"{name} cannot be made: {type(error).__name__}: {error}"
            raise DataError(f"{where}: {said}") from None
        found = {key: tuple(array.shape) for key, array in self.weights.items()}
        if found != shapes:
            said = f"the weights do not fit {name}"
            if name in _LARGEST:
                said = f"weights {found} where a {name} model has {shapes}"
            raise DataError(f"{where}: {said}"[:1000])
        return network, Layout(tuple(shapes.items()))

    def _check_items(self, where: str) -> None:
        items, carried = self.items, (self.item_encoder, self.catalogue)
        if items is None:
            if any(part is not None for part in carried):
                raise DataError(f"{where}: a catalogue, and no candidates")
            return
        made, words = self.item_encoder, len(self.item_vocabulary or ())
        if made and (_made_by(made), made.words) != ((items.kind, items.shape), words):
            raise DataError(f"{where}: the items' columns do not fit {items.kind} {items.shape}")
        if self.catalogue is not None:
            try:
                check_features(self.catalogue.features, items.kind, items.shape)
            except DataError as error:
                raise DataError(f"{where}: catalogue: {error}") from None

    @property
    def num_actions(self) -> int:
        """The number of fixed actions; 0 over candidates."""
        return len(self.actions)

    @property
    def data(self) -> DataSpec:
        """Kind and shape of what it looks at, as models are told."""
        return DataSpec(self.kind, self.shape, self.num_actions, self.items)

    @cached_property
    def bags(self) -> BagOfWords[str] | None:
        """Makes contexts of words; None where contexts hold none."""
        return None if self.vocabulary is None else BagOfWords(self.vocabulary)

    @cached_property
    def item_bags(self) -> BagOfWords[str] | None:
        """Makes features of an item's words; None where items have no text."""
        return None if self.item_vocabulary is None else BagOfWords(self.item_vocabulary)

    @cached_property
    def space(self) -> str:
        """Names what contexts and actions mean; events of another space cannot train this model.

        A catalogue is no part of it: items come and go, and the log says which one it means.
        """
        meaning: list[Any] = [self.kind, self.shape, self.actions, self.vocabulary]
        if self.encoder is not None:
            meaning.append(self.encoder.to_json())
        if self.items is not None:
            made = None if self.item_encoder is None else self.item_encoder.to_json()
            meaning.append([self.items.kind, self.items.shape, made])
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
        facts: dict[str, Any] = {name: getattr(self, name) for name in _WRITTEN}
        arrays = dict(self.weights)
        if self.trained_on is not None:
            facts["trained_on"] = self.trained_on
        if self.encoder is not None:
            facts["encoder"] = self.encoder.to_json()
        if self.items is not None:
            facts["items"] = dict(vars(self.items))
            if self.item_encoder is not None:
                facts["items"]["encoder"] = self.item_encoder.to_json()
                facts["items"]["vocabulary"] = self.item_vocabulary
            if self.catalogue is not None:
                facts["items"]["names"] = self.catalogue.names
                own = self.catalogue.arrays()
                arrays |= {_CATALOGUE + name: array for name, array in own.items()}
        text = json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **facts})
        return pack(arrays, {"model": text})

    @classmethod
    def from_bytes(cls, payload: bytes, where: str = "model") -> "DeviceModel":
        """Read what `to_bytes` made; anything else raises `DataError`."""
        try:
            arrays, texts = unpack(payload)
            text = texts["model"]
        except Exception as error:  # whatever a stranger's bytes make a parser do
            raise DataError(f"{where}: not a fedbandit model: {error!r}"[:300]) from None
        facts = _Facts.read(text, where)
        own = {k.removeprefix(_CATALOGUE): v for k, v in arrays.items() if k.startswith(_CATALOGUE)}
        weights = {name: array for name, array in arrays.items() if not name.startswith(_CATALOGUE)}
        if problem := _weights_problem(weights, facts.model["name"]):
            raise DataError(f"{where}: damaged: {problem}")
        if facts.kind == "sparse" and len(facts.shape) != 1:
            raise DataError(f"{where}: damaged: shape: sparse contexts have one axis")
        items, names = facts.items, None if facts.items is None else facts.items.names
        try:
            found = {
                "encoder": _read_encoder(facts.encoder),
                "item_encoder": None if items is None else _read_encoder(items.encoder),
                "item_vocabulary": None if items is None else items.vocabulary,
                "catalogue": None if names is None else ItemCatalogue.of_arrays(names, own),
            }
        except (ValueError, DataError) as error:
            raise DataError(f"{where}: damaged: {error}"[:300]) from None
        if items is not None:
            spec = ItemSpec(items.kind, items.shape, items.shown, items.most)
            found["items"] = spec  # type: ignore[assignment]
        plain = {name: getattr(facts, name) for name in (*_WRITTEN, "trained_on")}
        return cls(weights=weights, **plain, **found)  # type: ignore[arg-type]

    @classmethod
    def of_experiment(
        cls,
        experiment: "Experiment",
        weights: np.ndarray,
        version: int,
        progress: Progress | None = None,
        catalogue: bool = True,
    ) -> "DeviceModel":
        """A simulation's flat weights as the model that devices act with, with an explicit rule.

        The rule is the one that belongs to the progress. Over candidates the file carries the data
        set's `catalogue` unless told otherwise; then apps give the features of every candidate.
        """
        dataset, config = experiment.dataset, experiment.config
        header, policy = dataset.header, experiment.bandit.work.policy
        actions = header.typical_actions
        progress = progress or Progress(version=version, actions=actions)
        has_words = header.kind == "sparse" if header.encoder is None else header.encoder.words > 0
        items = dataset.train.catalogue if catalogue and header.items is not None else None
        return cls(
            version=version,
            weights=experiment.acting.layout.split(weights),
            actions=header.actions,
            kind=header.kind,
            shape=header.shape,
            policy=described_at(config.policy.model_dump(), policy, progress),
            model=experiment.acting.described,
            vocabulary=tuple(dataset.vocabulary()) if has_words and dataset.path else None,
            encoder=header.encoder,
            items=header.items,
            item_encoder=header.item_encoder,
            item_vocabulary=tuple(dataset.item_vocabulary()) or None,
            catalogue=None if items is None else _named_items(items),
        )


_WRITTEN = ("version", "actions", "kind", "shape", "policy", "model", "vocabulary")


def _named_items(items: Catalogue) -> ItemCatalogue:
    """A data set's catalogue as a file carries it: the newest row of every item, by its name."""
    features, rows = items.features, np.arange(len(items.features))
    if items.items is not None:
        since = np.zeros(len(rows)) if items.since is None else np.asarray(items.since)
        order = np.lexsort((since, items.items))
        last = np.flatnonzero(np.diff(items.items[order], append=-1))
        rows = order[last]
    taken = features.take(rows) if isinstance(features, Ragged) else np.asarray(features[rows])
    if not isinstance(taken, Ragged):
        taken = taken.astype(np.float32)
    return ItemCatalogue(tuple(items.name(number) for number in range(len(items))), taken)


def _made_by(encoder: Encoder) -> tuple[str, tuple[int, ...]]:
    """Kind and shape of the features that an encoder makes."""
    return "dense" if encoder.dense else "sparse", (encoder.width,)


def _read_encoder(found: Any) -> Encoder | None:
    return None if found is None else Encoder.from_json(found)


def _weights_problem(weights: Mapping[str, np.ndarray], name: str) -> str | None:
    largest = _LARGEST.get(name, _LARGEST_BEHIND_LAYERS)
    for key, array in weights.items():
        if array.dtype not in (np.float32, np.float64):
            return f"{key[:50]}: {array.dtype} where float32 or float64 was expected"
        if name == "linear-width" and key.endswith("_precision") and not array.min() > 1 / largest:
            return f"{key}: must be positive"
        if (found := float(np.abs(array).max(initial=0))) > largest and isfinite(found):
            return f"{key[:50]}: {found:.4g} is too large; scores stay finite up to {largest:g}"
    return None


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Changes whenever a file is written again; None while there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError:  # a link to itself: it exists, and reading it says what is wrong
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def read_model_file(path: Path, otherwise: str = "install a model again") -> bytes:
    """The bytes of a model file; `DataError` where it is missing, is no file, or lies of
    its size.
    """
    try:
        return read_packed(path)
    except FileNotFoundError:
        raise DataError(f"{path}: missing; {otherwise}") from None
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path}: damaged ({what}); {otherwise}") from None


def _digest(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


class _Pointer(BaseModel):
    """Which model is in use, and the digests under which those on the device were installed."""

    model_config = ConfigDict(strict=True, extra="ignore")
    version: int = Field(ge=0, le=LAST_VERSION)
    sha256: str
    digests: dict[str, str]


class ModelFiles:
    """The versions that a device keeps: `install`, `use`, `load_current`.

    Each is a file `model-N.safetensors`. `current.json` names the one in use and the digests under
    which all of them were installed; it is written last, so a kill leaves the one before in use.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = folder
        self.keep = max(1, keep)
        make_private_folder(folder)
        self._pointer = folder / "current.json"

    def stamp(self) -> tuple[int, int] | None:
        """Changes whenever another model comes into use; None before the first. Cheap enough for
        every decision.
        """
        return stamp_of(self._pointer)

    def versions(self) -> list[int]:
        """The versions on this device, ascending."""
        found = (
            path.stem.removeprefix("model-") for path in self.folder.glob("model-*.safetensors")
        )
        return sorted(int(number) for number in found if number.isascii() and number.isdigit())

    def current(self) -> _Pointer | None:
        """Version and digest of the model in use; None before the first."""
        try:
            return _Pointer.model_validate_json(read_small(self._pointer))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            why = str(error).replace("\n", " ")[:100]
            raise DataError(f"{self._pointer}: damaged ({why}); install a model again") from None

    def install(self, payload: bytes, *, older: bool = False) -> bool:
        """Check a model, keep it and use it; an older one than that in use is left alone unless
        `older` is set.
        """
        model, digest = DeviceModel.from_bytes(payload), _digest(payload)
        path = self._path(model.version)
        with alone_in(self.folder):
            kept = current = None
            with suppress(DataError):  # damaged; to install a model is what mends it
                current = self.current()
            if current is not None and model.version < current.version and not older:
                return False
            with suppress(DataError):  # missing or damaged, and written again
                kept = _digest(read_model_file(path))
            if current is not None and model.version == current.version:
                if current.sha256 != digest:
                    said = "already in use with other weights; a new model needs a new version"
                    raise DataError(f"model {model.version}: {said}")
                if kept == digest:
                    return False
            if kept != digest:
                self._write(path, payload)
            self._point_to(model.version, digest, current)
        return True

    def use(self, version: int) -> None:
        """Go back (or forward) to a version that is still on this device."""
        path = self._path(version)
        with alone_in(self.folder):
            there = f"not on this device as it was; it has {self.versions()}"
            payload = read_model_file(path, there)
            DeviceModel.from_bytes(payload, str(path))
            current = None
            with suppress(DataError):
                current = self.current()
            self._point_to(version, _digest(payload), current)

    def load_current(self) -> DeviceModel:
        """The model in use, checked against the digest under which it was installed."""
        pointer = self.current()
        if pointer is None:
            raise DataError(f"{self.folder}: no model yet; install one first")
        try:
            return self._load(pointer.version, pointer.sha256)
        except DataError:
            if pointer == self.current():
                raise
            return self.load_current()  # newer versions came and cleared this one away meanwhile

    def load_previous(self) -> DeviceModel:
        """The newest older version on this device that still has the digest under which it was
        installed.
        """
        pointer = self.current()
        for version in reversed(self.versions()):
            if pointer is not None and version < pointer.version:
                with suppress(DataError):
                    return self._load(version, pointer.digests.get(str(version)))
        raise DataError(f"{self.folder}: no earlier model to act with; install one")

    def _load(self, version: int, digest: str | None) -> DeviceModel:
        path = self._path(version)
        payload = read_model_file(path)
        if _digest(payload) != digest:
            raise DataError(f"{path}: damaged (its digest has changed); install a model again")
        return DeviceModel.from_bytes(payload, str(path))

    def catalogues(self, digests: Iterable[str | None]) -> dict[str, ItemCatalogue]:
        """The catalogues of these digests that models on this device carry."""
        wanted, found = set(digests) - {None}, {}
        for version in self.versions() if wanted else []:
            with suppress(DataError):
                carried = DeviceModel.from_bytes(read_model_file(self._path(version))).catalogue
                if carried is not None and carried.digest in wanted:
                    found[carried.digest] = carried
        return found

    def _path(self, version: int) -> Path:
        return self.folder / f"model-{version}.safetensors"

    def _point_to(self, version: int, digest: str, before: _Pointer | None) -> None:
        """Have the version in use, and forget the oldest beyond those that are kept."""
        there = self.versions()
        outdated = {other for other in there[: -self.keep] if other != version}
        kept = {str(other) for other in there if other not in outdated}
        known = {} if before is None else before.digests
        digests = {name: found for name, found in known.items() if name in kept}
        pointer = {
            "version": version,
            "sha256": digest,
            "digests": digests | {str(version): digest},
        }
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
