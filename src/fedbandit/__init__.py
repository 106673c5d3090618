"""fedbandit: federated contextual bandits, from simulation to devices.

Names are imported when they are first used, so that the command line starts fast and a device needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedbandit.core.errors import needing

__version__ = "0.3.0.dev0"
_HOMES = {
    "Config": "fedbandit.config",
    "preset": "fedbandit.presets",
    "open_dataset": "fedbandit.data",
    "FederatedDataset": "fedbandit.data",
    "import_frame": "fedbandit.data",
    "import_log": "fedbandit.data",
    "run": "fedbandit.runs.run",
    "simulate": "fedbandit.simulation",
    "compare": "fedbandit.studies.compare",
    "sweep": "fedbandit.studies.sweeps",
    "evaluate": "fedbandit.studies.evaluate",
    "export": "fedbandit.studies.trained_models",
    "Results": "fedbandit.results",
    "Agent": "fedbandit.deploy",
    "Model": "fedbandit.models",
    "DataSpec": "fedbandit.models",
    "trusting": "fedbandit.core.parts",
    "FedbanditError": "fedbandit.core.errors",
    "ConfigError": "fedbandit.core.errors",
    "DataError": "fedbandit.core.errors",
}
_PACKAGES = (
    "acting",
    "algorithms",
    "compression",
    "data",
    "deploy",
    "engines",
    "environments",
    "models",
    "objectives",
    "ope",
    "policies",
    "privacy",
    "results",
    "theory",
)
__all__ = [*_HOMES, *_PACKAGES, "__version__"]

if TYPE_CHECKING:
    from fedbandit import acting as acting
    from fedbandit import algorithms as algorithms
    from fedbandit import compression as compression
    from fedbandit import data as data
    from fedbandit import deploy as deploy
    from fedbandit import engines as engines
    from fedbandit import environments as environments
    from fedbandit import models as models
    from fedbandit import objectives as objectives
    from fedbandit import ope as ope
    from fedbandit import policies as policies
    from fedbandit import privacy as privacy
    from fedbandit import results as results
    from fedbandit import simulation as _simulation
    from fedbandit import theory as theory
    from fedbandit.config import Config as Config
    from fedbandit.core.errors import ConfigError as ConfigError
    from fedbandit.core.errors import DataError as DataError
    from fedbandit.core.errors import FedbanditError as FedbanditError
    from fedbandit.core.parts import trusting as trusting
    from fedbandit.data import FederatedDataset as FederatedDataset
    from fedbandit.data import import_frame as import_frame
    from fedbandit.data import import_log as import_log
    from fedbandit.data import open_dataset as open_dataset
    from fedbandit.deploy import Agent as Agent
    from fedbandit.models import DataSpec as DataSpec
    from fedbandit.models import Model as Model
    from fedbandit.presets import preset as preset
    from fedbandit.results import Results as Results
    from fedbandit.runs.run import run as run
    from fedbandit.studies.compare import compare as compare
    from fedbandit.studies.evaluate import evaluate as evaluate
    from fedbandit.studies.sweeps import sweep as sweep
    from fedbandit.studies.trained_models import export as export

    simulate = _simulation.simulate


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"fedbandit.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'fedbandit' has no attribute {name!r}")
    with needing(name):
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
