"""Sending a run's metrics elsewhere: TensorBoard, or anything with the two methods of `Tracker`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.core.extras import needing
from fedbandit.core.parts import construct, flatten, resolve


class Tracker(Protocol):
    """Made with the run's folder and configuration, updated after every round, and closed at the end."""

    def update(self, metrics: dict[str, Any]) -> None:
        """One round's metrics, as in `metrics.jsonl`."""
        ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars of every round and the configuration as text, below `tensorboard` in the run's folder."""

    def __init__(self, folder: Path, config: Config) -> None:
        with needing("--tracker tensorboard"):
            from torch.utils.tensorboard.writer import SummaryWriter
        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("config", f"```\n{config.to_toml()}```")

    def update(self, metrics: dict[str, Any]) -> None:
        for name, value in flatten(metrics).items():
            if isinstance(value, int | float) and name != "round":
                self._writer.add_scalar(name.replace(".", "/"), value, metrics["round"])

    def close(self) -> None:
        self._writer.close()


BUILT_IN = {"tensorboard": TensorBoard}


def tracker_named(name: str) -> Callable[[Path, Config], Tracker]:
    """What makes trackers of that name: a built-in one, or `my_module:MyTracker`."""
    make = resolve("--tracker", name, BUILT_IN)

    def made(folder: Path, config: Config) -> Tracker:
        tracker: Tracker = construct("--tracker", make, {}, folder, config)
        for method in ("update", "close"):
            if not callable(getattr(tracker, method, None)):
                raise ConfigError(f"--tracker: {name} has no method {method}")
        return tracker

    return made
