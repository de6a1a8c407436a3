"""Replay manager and learner as hardware: generators, simulations and models (Zhang, section 4.2)."""
