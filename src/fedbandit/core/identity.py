"""Which run a file belongs to, and which code a run executes: ids and digests, computed here alone.

A run's id stands in every file of it: checkpoints, clients' memory, summary, metrics and timings.
A user's modules are compiled from the very bytes that are hashed: Python tells its compiled files
apart by size and second, and an edit may change neither.
"""

import hashlib
import importlib
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import islice
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.files import (
    last_lines,
    lines_in,
    object_in,
    open_regular,
    parse_toml,
    read_object,
    read_small,
)

# Raise this in the commit that changes any number that a run computes, and store the digests again
# as tests/test_results_number.py says. Runs and pre-trained models of another number are then not
# continued or reused; long runs survive every commit that leaves it alone.
RESULTS = 4


_executed: dict[
    str, bytes
] = {}  # the source of each module of a user's, by name, as it was when it was executed


def import_module(name: str) -> ModuleType:
    """The module of that name; if it is not loaded yet, it and the user's modules it imports are
    compiled again.
    """
    if name in sys.modules:
        return sys.modules[name]
    if (
        os.getcwd() not in sys.path
    ):  # a module beside the TOML file, as a user would expect of `python -m`
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()  # a file may have been written a moment ago
    already = _Finder in sys.meta_path
    if not already:
        sys.meta_path.insert(0, _Finder)
    try:
        return importlib.import_module(name)
    finally:
        if not already:
            sys.meta_path.remove(_Finder)


def always_compile() -> None:
    """From now on have every module of a user's in this process compiled from its source, whoever
    imports it.
    """
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def require_sources(names: Iterable[str], expected: Mapping[str, str]) -> None:
    """Have the code behind these parts loaded that the digests name; `ConfigError` if this machine
    has other code.

    What was loaded before a file was edited is loaded again. A module that is not loaded here is not
    executed here.
    """
    names = list(names)
    for attempt in (1, 2):
        found = loaded_digests(names)
        wrong = [file for file, digest in found.items() if expected.get(file) != digest]
        if not wrong:
            return
        if attempt == 1:
            for module in _closure(names):
                sys.modules.pop(module, None)
                _executed.pop(module, None)
    raise ConfigError(f"{wrong[0]}: is other code on this machine than where the run was started")


def place_of(error: BaseException) -> str | None:
    """Where in a user's own code an error was raised: `my_policy.py, line 11`; None if it was
    elsewhere.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else None


def source_digests(names: Iterable[str]) -> dict[str, str]:
    """The digest of every source file behind parts named by import paths, by its file; built-in
    names have none.

    These are the modules that the parts are in, and those of the user's that they import.
    """
    found = {
        _file_of(name): hashlib.sha256(source).hexdigest()
        for name, source in _closure(names).items()
    }
    return dict(sorted(found.items()))


def loaded_digests(names: Iterable[str]) -> dict[str, str]:
    """As `source_digests`, with all the parts loaded."""
    names = [name for name in names if ":" in name]
    for name in names:
        with suppress(
            Exception
        ):  # whatever a user's own file does when it is read: who builds the part says it
            import_module(name.partition(":")[0])
    return source_digests(names)


def _closure(names: Iterable[str]) -> dict[str, bytes]:
    """The modules that parts are in, and those of the user's that they import, each with its
    source.
    """
    waiting = [name.partition(":")[0] for name in names if ":" in name]
    found: dict[str, bytes] = {}
    while waiting:
        name = waiting.pop()
        if name in found or (source := _source(name)) is None:
            continue
        found[name] = source
        waiting += [other for other in _imports(name, source) if _is_users(_origin(other))]
    return found


class _Loader(SourceFileLoader):
    """Compiles a module from its source, and remembers the bytes that it was compiled from."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        code: CodeType = self.source_to_code(source, path)
        _executed[fullname] = source
        return code


class _Finder:
    """Finds what Python would find, and has a user's own modules loaded by `_Loader`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or not _is_users(spec.origin):
            return None
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin)
        return spec


@cache
def _installed() -> tuple[Path, ...]:
    """Where Python, installed packages and fedbandit itself are: their versions are known by other
    means.
    """
    places = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (
        *(Path(place).resolve() for place in places if place),
        Path(__file__).resolve().parents[1],
    )


def _is_users(origin: str | None) -> bool:
    """Whether a file is neither of Python, nor of an installed package, nor of fedbandit."""
    if origin is None or not origin.endswith(".py"):
        return False
    path = Path(origin).resolve()
    return not any(path.is_relative_to(place) for place in _installed())


def _origin(name: str) -> str | None:
    """The file of a loaded module; None where it has none."""
    return getattr(sys.modules.get(name), "__file__", None)


def _source(name: str) -> bytes | None:
    """The source that was executed; of a module that somebody else has loaded, its file's when we
    first saw it.
    """
    origin = _origin(name)
    if (
        name not in _executed
        and origin is not None
        and origin.endswith(".py")
        and name.split(".")[0] != "fedbandit"
    ):
        try:
            _executed[name] = Path(origin).read_bytes()
        except OSError:
            return None
    return _executed.get(name)


def _file_of(name: str) -> str:
    """`my_package/my_module.py`: the same wherever the folder lies."""
    inside = Path(_origin(name) or "").name == "__init__.py"
    return f"{name.replace('.', '/')}{'/__init__' if inside else ''}.py"


def _imports(name: str, source: bytes) -> Iterator[str]:
    """The loaded modules that a module's source imports, and the packages that they and it
    are in.
    """
    import ast

    found = [name.rpartition(".")[0]]
    package = name if _file_of(name).endswith("/__init__.py") else name.rpartition(".")[0]
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue  # whether what it imports is loaded yet depends on who has called it
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    for module in dict.fromkeys(found):
        parts = module.split(".")
        around = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        yield from (one for one in around if one in sys.modules)


# Keys of a configuration that say where a run is computed, and nothing about what it computes.
WHERE_COMPUTED = ("threads", "engine", "device")
# What decides a run's results beside its configuration; `secret` is a digest, of runs whose noise
# is not seeded.
MADE_FROM = ("results", "data_fingerprint", "sources", "files", "secret")


def settings_of_results(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings on which results depend: all but where a run is computed, and limits that only
    refuse.
    """
    values = {key: value for key, value in config.items() if key not in WHERE_COMPUTED}
    for name in ("algorithm", "aggregation"):
        values[name] = {k: v for k, v in _section(values, name).items() if k != "memory_limit"}
    return values


def run_id(config: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """The id of a run, from the values of its `config.toml` and `environment.json`: 32 hexadecimal
    digits.

    A run may be extended and its data moved, so its length and where its data lie are not part of
    its id, unless it is private: its noise is planned for the one, and drawn by the other.

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
    """A digest of values that JSON can hold, and of the bytes of arrays; a key without a value is
    as a missing one.
    """
    digest = hashlib.sha256(json.dumps(_set(values), sort_keys=True, default=str).encode())
    for array in arrays:
        digest.update(array)
    return digest.hexdigest()[:32]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Have an error while a file is read be one line: it cannot be read, or it is damaged."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}: damaged: {error}") from None


def run_in(folder: Path) -> str:
    """The id of the run in a folder, whose `config.toml` and `environment.json` must agree on it;
    else `DataError`.
    """
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
    """Refuse a file that names another run than this one, or none; `remedy` says what to do about
    it.
    """
    if found != run:
        wrong = "names no run" if found is None else "of another run than the files beside it"
        raise DataError(f"{path}: {wrong}; {remedy}")


def read_rounds(path: Path, run: str) -> list[dict[str, Any]]:
    """The rounds in a run's metrics or timings; its first line, `{"run": id}`, must name the run.

    A last line that is still being written is left out.
    """
    return [object_in(line) for lines in lines_of_rounds(path, run) for line in lines]


def lines_of_rounds(path: Path, run: str) -> Iterator[list[bytes]]:
    """The lines that `read_rounds` reads, about a thousand at a time."""
    with open_regular(path) as file:
        lines = lines_in(file)
        if (first := next(lines, None)) is None:
            return  # it is only just being written
        require_run(path, object_in(first).get("run"), run)
        while block := list(islice(lines, 1000)):
            yield block


PRIVATE = "private"
"""The folder in a run's folder for what is exact of clients' data; for its owner alone."""


def owners(path: Path) -> Path:
    """The exact copy of a file of a run folder, where there is one that may be read; else the file.

    Runs with `privacy.noise = "system"` have two of metrics and summary: one for others, and one
    for their owner, whose `Results` and reports are made from it.
    """
    exact = path.parent / PRIVATE / path.name
    return exact if os.access(exact, os.R_OK) else path


def last_rounds(path: Path, enough: int = 1 << 16) -> list[bytes]:
    """The last complete lines of rounds in a run's metrics or timings, as `last_lines`
    finds them.
    """
    return [line for line in last_lines(path, enough) if not line.startswith(b'{"run"')]


def file_digests(parts: Iterable[Any], named: Iterable[str] = ()) -> dict[str, str]:
    """The SHA-256 of every file that a part reads, as its `files()` lists them, and of those that
    are `named`.

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
    """A section of a configuration; empty where it is missing or something else."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _set(values: Any) -> Any:
    """The values without keys that are not set, which TOML leaves out."""
    if isinstance(values, Mapping):
        return {key: _set(value) for key, value in values.items() if value is not None}
    return [_set(value) for value in values] if isinstance(values, list | tuple) else values
