"""DPSGD (Mohamad et al., Algorithms 1 and 2)."""

from murmurate.strategies.dpsgd.strategy import DPSGD

__all__ = ["DPSGD"]
