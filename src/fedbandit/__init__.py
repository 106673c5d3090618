"""fedbandit: federated contextual bandits, from simulation to devices.

Names are imported when they are first used, so that the command line starts fast and a device needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedbandit.core.extras import needing

__version__ = "0.1.0"
_HOMES = {
    "Config": "fedbandit.config",
    "FederatedDataset": "fedbandit.data",
    "open_dataset": "fedbandit.data",
    "Model": "fedbandit.models",
    "DataSpec": "fedbandit.models",
    "simulate": "fedbandit.simulation.simulate",
    "preset": "fedbandit.presets",
}
__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from fedbandit.config import Config as Config
    from fedbandit.data import FederatedDataset as FederatedDataset
    from fedbandit.data import open_dataset as open_dataset
    from fedbandit.models import DataSpec as DataSpec
    from fedbandit.models import Model as Model
    from fedbandit.presets import preset as preset
    from fedbandit.simulation.simulate import simulate as simulate


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedbandit' has no attribute {name!r}")
    with needing(name):
        return getattr(import_module(_HOMES[name]), name)
