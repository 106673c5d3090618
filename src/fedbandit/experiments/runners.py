"""Where the runs of a command are played: on this machine, or spread over a Ray cluster."""

from collections.abc import Iterator
from contextlib import contextmanager

from fedbandit.errors import ConfigError
from fedbandit.experiments.many import LocalRunner, Runner


@contextmanager
def runner_of(engine: str, ray_address: str | None = None, workers: int | None = None) -> Iterator[Runner]:
    """The runner that the options `--engine`, `--ray-address` and `--workers` ask for, for as long as it is needed."""
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers: should be at least 1, not {workers}")
    if engine not in ("threads", "ray"):
        raise ConfigError(f"--engine: should be threads or ray, not {engine!r}")
    if engine == "threads":
        if ray_address is not None:
            raise ConfigError("--ray-address: is for --engine ray")
        yield LocalRunner(workers)
        return
    from fedbandit.experiments.many_ray import RayRunner

    runner = RayRunner(ray_address, workers)
    try:
        yield runner
    finally:
        runner.close()
