"""From a name in a configuration to a model that fits the data."""

from collections.abc import Mapping
from typing import Any

from fedbandit.components import construct, resolve
from fedbandit.errors import ConfigError
from fedbandit.models.base import DataSpec, Model
from fedbandit.models.linear import linear
from fedbandit.models.networks import cnn, mlp

BUILT_IN = {"linear": linear, "cnn": cnn, "mlp": mlp}


def build_model(name: str, data: DataSpec, parameters: Mapping[str, Any] | None = None) -> Model:
    """The model of that name: built in, or `my_package.my_module:my_model`, a `Model` or a function that makes one."""
    found = resolve("model.name", name, BUILT_IN)
    if isinstance(found, Model):
        if parameters:
            raise ConfigError(f"model.{next(iter(parameters))}: {name} is a finished model and takes no parameters")
        return found
    model = construct("model", found, parameters or {}, data)
    if not isinstance(model, Model):
        raise ConfigError(f"model.name: {name} made a {type(model).__name__}, not a fedbandit.models.Model")
    return model
