"""The folder that `flwr run` sends to the SuperLink: a few lines that name the apps of the installed package."""

from pathlib import Path

SERVER = 'from fedbandit.deploy.flower.server_app import app\n\n__all__ = ["app"]\n'
CLIENT = 'from fedbandit.deploy.flower.client_app import app\n\n__all__ = ["app"]\n'
_PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedbandit-apps"
version = "1.0.0"
description = "Federated contextual bandits on devices"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedbandit"

[tool.flwr.app.components]
serverapp = "fedbandit_apps.server:app"
clientapp = "fedbandit_apps.client:app"

[tool.flwr.app.config]
deployment = ""
"""


def write_bundle(folder: Path, *, client: str = CLIENT, server: str = SERVER) -> Path:
    """Write the bundle; `client` is the text of a module with a client app of your own."""
    package = folder / "fedbandit_apps"
    package.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(_PROJECT, encoding="utf-8")
    (package / "__init__.py").write_text('"""Apps for Flower."""\n', encoding="utf-8")
    (package / "server.py").write_text(server, encoding="utf-8")
    (package / "client.py").write_text(client, encoding="utf-8")
    return folder
