"""Fast forms of the built-in models, forward and back; `Model.kernel` names the one that fits."""
