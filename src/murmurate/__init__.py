"""murmurate: write the learner once; how its replicas agree is a part you swap."""

__version__ = "0.1.0"
