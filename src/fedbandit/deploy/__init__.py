"""Deployment: what an app on a device needs to act, to log and to learn, without a server in reach.

For linear models it needs numpy, safetensors and pydantic; nothing heavier is imported.
"""

from fedbandit.deploy.device.agent import Agent, Decision, SimulatedDraws
from fedbandit.deploy.device.log import LogUnavailable, Outcome, Retention
from fedbandit.deploy.device.model_files import DeviceModel, ItemCatalogue

__all__ = [
    "Agent",
    "Decision",
    "DeviceModel",
    "ItemCatalogue",
    "LogUnavailable",
    "Outcome",
    "Retention",
    "SimulatedDraws",
]
