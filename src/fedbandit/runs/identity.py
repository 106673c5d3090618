"""What makes a run the run it is: configuration, data, the results number, and the source of the user's own parts.

A folder of another run is refused with one line that names the first difference.
"""

import importlib
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedbandit import __version__
from fedbandit.config import PARTS, Config, read_toml
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.files import read_object
from fedbandit.core.parts import resolve, with_defaults
from fedbandit.core.sources import source_digests
from fedbandit.core.versions import RESULTS
from fedbandit.data.dataset import Header

_PACKAGES = ("torch", "numpy", "numba", "safetensors")


def environment_of(config: Config, header: Header) -> dict[str, Any]:
    """What `environment.json` holds: the parts of the identity that are not in the configuration, and versions.

    `parts` has every part with the defaults that it was made with. They are there to be read: what a default means is
    covered by the results number.
    """
    return {
        "fedbandit": __version__,
        "results": RESULTS,
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{name: version(name) for name in _PACKAGES},
        "data": header.name,
        "data_fingerprint": header.fingerprint,
        "sources": source_digests(config.part_names()),
        "parts": _parts(config),
    }


def refuse_another(path: Path, config: Config, header: Header, finished: bool) -> None:
    """Refuse a folder that holds another run than the one that these make; it is only read."""
    made = Config.build(read_toml(path / "config.toml"), where=f"{path / 'config.toml'}: ")
    kept = _kept_environment(path / "environment.json")
    there = {**made.identity(), "data": kept.get("data_fingerprint")}
    here = {**config.identity(), "data": header.fingerprint}
    if difference := _first_difference("", there, here):
        raise ConfigError(f"{path}: made by another configuration ({difference}); nothing was overwritten")
    before = "already finished; " if finished else ""
    if (results := kept.get("results", 1)) != RESULTS:  # folders without the number are older than it
        raise ConfigError(
            f"{path}: {before}fedbandit computes other results since (results number {results!r} there and {RESULTS}"
            " here); nothing was overwritten: use another folder"
        )
    recorded = kept.get("sources")
    if not isinstance(recorded, dict):  # of a version that did not note them
        return
    current = source_digests(config.part_names())
    for file in [*recorded, *current]:
        if recorded.get(file) != current.get(file):
            raise ConfigError(f"{path}: {before}{file} has changed since; nothing was overwritten: use another folder")


def _kept_environment(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}: damaged: {error}") from None


def _parts(config: Config) -> dict[str, dict[str, Any]]:
    found = {}
    for section, key, module, leading in PARTS:
        chosen = getattr(config, section)
        name, parameters = getattr(chosen, key), chosen.parameters
        if (section, name) != ("compression", "none"):
            make = resolve(f"{section}.{key}", name, importlib.import_module(module).BUILT_IN)
            parameters = with_defaults(make, parameters, leading)
        found[section] = {key: name, **parameters}
    return found


def _first_difference(path: str, there: Any, here: Any) -> str | None:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*there, *(key for key in here if key not in there)]:
            if found := _first_difference(f"{path}.{key}".lstrip("."), there.get(key), here.get(key)):
                return found
        return None
    return None if there == here else f"{path} is {there!r} there and {here!r} here"
