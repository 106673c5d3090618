"""On the device: the agent, its log, model files, and the answers to a server's requests."""
