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
__all__ = [
    "Agent",
    "Config",
    "ConfigError",
    "DataError",
    "DataSpec",
    "FedbanditError",
    "FederatedDataset",
    "Model",
    "Results",
    "__version__",
    "acting",
    "algorithms",
    "compare",
    "compression",
    "data",
    "deploy",
    "engines",
    "environments",
    "evaluate",
    "export",
    "import_frame",
    "import_log",
    "models",
    "objectives",
    "ope",
    "open_dataset",
    "policies",
    "preset",
    "privacy",
    "results",
    "run",
    "simulate",
    "sweep",
    "theory",
    "trusting",
]

if TYPE_CHECKING:
    from fedbandit import (
        acting,
        algorithms,
        compression,
        data,
        deploy,
        engines,
        environments,
        models,
        objectives,
        ope,
        policies,
        privacy,
        results,
        theory,
    )
    from fedbandit.config import Config
    from fedbandit.core.errors import ConfigError, DataError, FedbanditError
    from fedbandit.core.parts import trusting
    from fedbandit.data import FederatedDataset, import_frame, import_log, open_dataset
    from fedbandit.deploy import Agent
    from fedbandit.models import DataSpec, Model
    from fedbandit.presets import preset
    from fedbandit.results import Results
    from fedbandit.runs.run import run
    from fedbandit.simulation import simulate
    from fedbandit.studies.compare import compare
    from fedbandit.studies.evaluate import evaluate
    from fedbandit.studies.sweeps import sweep
    from fedbandit.studies.trained_models import export


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fedbandit' has no attribute {name!r}")
    if name not in _HOMES:
        return import_module(f"fedbandit.{name}")
    with needing(name):
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
