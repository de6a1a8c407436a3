"""``murmurate.conformance.smallest``, with images of known data sets."""

from __future__ import annotations

from murmurate.conformance.smallest import DATA, recipe_of, smallest
from pictures import write_cifar10, write_cifar100, write_fashion

__all__ = ["DATA", "recipe_of", "smallest"]

DATA |= {"fashion": write_fashion, "cifar10": write_cifar10, "cifar100": write_cifar100}
