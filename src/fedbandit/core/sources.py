"""What identifies code: the results number of fedbandit's own, and digests of the source of a
user's parts as executed.

Those are compiled from the very bytes that are hashed: Python tells its compiled files apart by
size and second, and an edit may change neither.
"""

import hashlib
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from fedbandit.core.errors import ConfigError

# Raise this in the commit that changes any number that a run computes, and store the digests anew as
# tests/test_results_number.py says. Runs and pre-trained models of another number are then not continued or reused;
# long runs survive every commit that leaves it alone.
RESULTS = 4


_executed: dict[
    str, bytes
] = {}  # the source of each module of a user's, by name, as it was when it was executed


def import_module(name: str) -> ModuleType:
    """The module of that name; if it is not loaded yet, it and the user's modules it imports are
    compiled anew.
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

    What was loaded before a file was edited is loaded anew. A module that is not loaded here is not
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
    if origin is None or not origin.endswith(".py"):
        return False
    path = Path(origin).resolve()
    return not any(path.is_relative_to(place) for place in _installed())


def _origin(name: str) -> str | None:
    return getattr(sys.modules.get(name), "__file__", None)


def _source(name: str) -> bytes | None:
    """What was executed, or for a module that somebody else has loaded, what its file held when we
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
    """The loaded modules that a module's source imports, and the packages that they and it are in."""
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
