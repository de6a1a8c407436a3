"""A prioritized replay's manager as hardware: its generator, simulation and model (Zhang, section 4.2)."""
