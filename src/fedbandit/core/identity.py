"""Which run a file belongs to: one id, computed here from all that decides a run's results, and checked here.

The id stands in every file of a run: checkpoints, clients' memory, summary, and the first line of metrics and timings.
A pre-trained model has an id by the same means. Knows nothing of what the files hold beside it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.files import (
    last_lines,
    object_in,
    open_regular,
    parse_toml,
    read_object,
    read_small,
)

# Keys of a configuration that say where a run is computed, and nothing about what it computes.
WHERE_COMPUTED = ("threads", "engine", "device")
# What decides a run's results beside its configuration; `secret` is a digest, of runs whose noise is not seeded.
MADE_FROM = ("results", "data_fingerprint", "sources", "files", "secret")


def settings_of_results(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings on which results depend: all but where a run is computed, and limits that only refuse."""
    values = {key: value for key, value in config.items() if key not in WHERE_COMPUTED}
    for name in ("algorithm", "aggregation"):
        values[name] = {k: v for k, v in _section(values, name).items() if k != "memory_limit"}
    return values


def run_id(config: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """The id of a run, from the values of its `config.toml` and `environment.json`: 32 hexadecimal digits.

    A run may be extended and its data moved, so its length and where its data lie are not part of its id, unless it is
    private: its noise is planned for the one, and drawn by the other.

    Examples:
        >>> short, long = {"seed": 1, "rounds": 100}, {"seed": 1, "rounds": 200}
        >>> run_id(short, {"results": 3}) == run_id(long, {"results": 3})
        True
        >>> run_id(short, {"results": 3}) == run_id({**short, "seed": 2}, {"results": 3})
        False
    """
    values = settings_of_results(config)
    if not is_private(config):
        values.pop("rounds", None)
        values["data"] = {k: v for k, v in _section(values, "data").items() if k != "source"}
    return digest_of([values, {key: environment.get(key) for key in MADE_FROM}])


def is_private(config: Mapping[str, Any]) -> bool:
    """Whether the configuration asks for differential privacy."""
    return bool(_section(config, "privacy").get("mechanism", "none") != "none")


def digest_of(values: Any, *arrays: bytes) -> str:
    """A digest of values that JSON can hold, and of the bytes of arrays; a key without a value is as a missing one."""
    digest = hashlib.sha256(json.dumps(_set(values), sort_keys=True, default=str).encode())
    for array in arrays:
        digest.update(array)
    return digest.hexdigest()[:32]


def run_in(folder: Path) -> str:
    """The id of the run in a folder, whose `config.toml` and `environment.json` must agree on it; else `DataError`."""
    try:
        config = parse_toml(read_small(folder / "config.toml"))
        environment = read_object(folder / "environment.json")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: damaged: {error}") from None
    refuse_earlier(folder, environment)
    found = run_id(config, environment)
    require_run(folder / "environment.json", environment.get("run"), found)
    return found


def refuse_earlier(folder: Path, environment: Mapping[str, Any]) -> None:
    """Refuse a run of 0.2 or earlier by its results number: its files name no run."""
    if "run" not in environment and environment.get("results") in (1, 2, 3):
        remedy = "use another folder, or the version that made it"
        raise DataError(f"{folder}: of a run of fedbandit 0.2 or earlier; {remedy}")


def require_run(
    path: Path,
    found: object,
    run: str,
    remedy: str = "put back the file of this run, or use another folder",
) -> None:
    """Refuse a file that names another run than this one, or none; `remedy` says what to do about it."""
    if found != run:
        wrong = "names no run" if found is None else "of another run than the files beside it"
        raise DataError(f"{path}: {wrong}; {remedy}")


def read_rounds(path: Path, run: str) -> list[dict[str, Any]]:
    """The lines of the rounds in a run's metrics or timings, behind the first, `{"run": id}`, which must name the run.

    A last line that is still being written is left out.
    """
    with open_regular(path) as file:
        if not (first := file.readline()).endswith(b"\n"):
            return []  # it is only just being written
        require_run(path, object_in(first).get("run"), run)
        return [object_in(line) for line in file if line.endswith(b"\n")]


def last_rounds(path: Path, enough: int = 1 << 16) -> list[bytes]:
    """The last complete lines of rounds in a run's metrics or timings, as `last_lines` finds them."""
    return [line for line in last_lines(path, enough) if not line.startswith(b'{"run"')]


def file_digests(parts: Iterable[Any], named: Iterable[str] = ()) -> dict[str, str]:
    """The SHA-256 of every file that a part reads, as its `files()` lists them, and of those that are `named`.

    Parts without `files` read none. `ConfigError` where a file cannot be read.
    """
    paths = [path for part in parts if hasattr(part, "files") for path in part.files()]
    found = {}
    for path in map(str, [*named, *paths]):
        try:
            with open_regular(Path(path)) as file:
                digest = hashlib.sha256()
                for block in iter(lambda: file.read(1 << 20), b""):
                    digest.update(block)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        found[path] = digest.hexdigest()
    return dict(sorted(found.items()))


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _set(values: Any) -> Any:
    """The values without keys that are not set, which TOML leaves out."""
    if isinstance(values, Mapping):
        return {key: _set(value) for key, value in values.items() if value is not None}
    return [_set(value) for value in values] if isinstance(values, list | tuple) else values
