"""Spatially parallel convolution: one replica's images spread over several parts (Jin 2018, chapter 4)."""

from murmurate.spatial.parallel import parallelize, whole_again
from murmurate.spatial.parts import PartLost, Parts
from murmurate.spatial.pixelwise import whole
from murmurate.spatial.tensor import SpatialTensor, scatter

__all__ = ["PartLost", "Parts", "SpatialTensor", "parallelize", "scatter", "whole", "whole_again"]
