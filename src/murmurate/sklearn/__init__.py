"""Topic models as an estimator of scikit-learn (docs/estimator.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from murmurate.sklearn.estimator import LatentDirichletAllocation

__all__ = ["LatentDirichletAllocation"]


if not TYPE_CHECKING:  # with ``__getattr__``, type checkers would accept any attribute of the module

    def __getattr__(name: str) -> Any:
        if name in __all__:
            # replicas import ``in_memory`` alone, and would take a second each to import scikit-learn
            from murmurate.sklearn import estimator

            return getattr(estimator, name)
        raise AttributeError(f"module 'murmurate.sklearn' has no attribute '{name}'")
