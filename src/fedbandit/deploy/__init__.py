"""Deployment: what an app on a device needs to act, to log and to learn, without a server in reach.

For linear models it imports numpy, safetensors and sqlite3 and nothing heavier.
"""

from fedbandit.deploy.agent import Agent, Decision
from fedbandit.deploy.draws import SimulatedDraws
from fedbandit.deploy.log import LogUnavailable, Outcome, Retention
from fedbandit.deploy.model_files import DeviceModel

__all__ = ["Agent", "Decision", "DeviceModel", "LogUnavailable", "Outcome", "Retention", "SimulatedDraws"]
