"""Acting: forward passes, exploration and drawing for a deployed version, one way for all."""

from fedbandit.acting.actor import (
    Actor,
    Chosen,
    NotFinite,
    Personal,
    WrongProbabilities,
    explore,
)
from fedbandit.acting.predictors import Predictor, make_predictor

__all__ = [
    "Actor",
    "Chosen",
    "NotFinite",
    "Personal",
    "Predictor",
    "WrongProbabilities",
    "explore",
    "make_predictor",
]
