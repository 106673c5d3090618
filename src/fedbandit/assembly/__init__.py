"""The one place that goes from a configuration to parts, for simulations, devices, servers and workers."""
