"""Topic models as an estimator of scikit-learn (docs/estimator.md)."""

from murmurate.sklearn.estimator import LatentDirichletAllocation

__all__ = ["LatentDirichletAllocation"]
