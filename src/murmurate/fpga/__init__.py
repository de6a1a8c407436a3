"""Replay manager and learner as hardware: generators, simulations and models (Zhang 2022, section 4.2)."""
