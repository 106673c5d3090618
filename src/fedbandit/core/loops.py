"""Loops in two forms that give the same bits: plain numpy, and compiled by numba.

Numba takes most of a second to load, and on a new machine ten more to compile. The plain forms need neither: they do
the work until they have taken a while, and the compiled ones do it from then on.
"""

import os
import time
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from math import inf
from typing import Any

import numpy as np

from fedbandit.core.errors import ConfigError

PATIENCE = (
    "FEDBANDIT_PATIENCE"  # seconds; 0: compile at once, inf: never where there is a plain form
)


class Loops:
    """The functions of two modules of the same names, taken from the plain one while its time lasts.

    What the plain module does not have is compiled when it is first needed; so is what its function answers
    `NotImplemented` to. Where numba is not installed, the plain forms are used for good.
    """

    def __init__(self, plain: str, compiled: str, patience: float = 0.5) -> None:
        self._plain, self._compiled, self._default, self._spent = plain, compiled, patience, 0.0

    @cached_property
    def _patience(self) -> float:
        if self._default == inf:
            return inf
        asked = os.environ.get(PATIENCE, self._default)
        try:
            return float(asked)
        except ValueError:
            raise ConfigError(f"{PATIENCE}: should be a number of seconds, not {asked!r}") from None

    @property
    def compiling(self) -> bool:
        """Whether the plain forms have had their time."""
        return self._spent >= self._patience and find_spec("numba") is not None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):  # no loop, but what Python asks of any object
            raise AttributeError(name)
        plain = None if self.compiling else getattr(import_module(self._plain), name, None)
        if plain is not None:
            return self._timed(name, plain)
        loop = self._from_compiled(name)
        setattr(self, name, loop)
        return loop

    def _from_compiled(self, name: str) -> Callable[..., Any]:
        loop: Callable[..., Any] = getattr(import_module(self._compiled), name)
        return loop

    def _timed(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def loop(*arguments: Any) -> Any:
            begin = time.perf_counter()
            with np.errstate(all="ignore"):  # compiled loops do not warn either
                result = plain(*arguments)
            self._spent += time.perf_counter() - begin
            return self._from_compiled(name)(*arguments) if result is NotImplemented else result

        return loop


loops = Loops("fedbandit.core.plain", "fedbandit.core.kernels")
plain_loops = Loops("fedbandit.core.plain", "fedbandit.core.kernels", patience=inf)
"""The same for devices, which never compile."""
