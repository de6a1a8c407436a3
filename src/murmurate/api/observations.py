"""Observations of any form, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate.datasets.corpus import Corpus
from murmurate.datasets.tokens import Tokens, WordCounter
from murmurate.errors import Refusal


def without_tensors(observation: Any) -> Any:
    """``observation`` with tensors as arrays, also those in mappings, tuples and lists: gymnasium's discrete
    spaces contain no tensor."""
    if isinstance(observation, Tensor):
        values = observation.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()  # NumPy has no bfloat16
    if isinstance(observation, Mapping):
        return {key: without_tensors(part) for key, part in observation.items()}
    if isinstance(observation, (list, tuple)):
        parts = map(without_tensors, observation)
        return tuple(parts) if isinstance(observation, tuple) else list(parts)
    return observation


def array_of(observation: Any) -> npt.NDArray[Any] | None:
    """``observation`` as an array; None for one of a Dict or Tuple space, and a list of these."""
    if isinstance(observation, (dict, tuple)) and not (
        isinstance(observation, tuple) and all(np.isscalar(x) for x in observation)
    ):
        return None
    try:
        array = np.asarray(observation)
    except ValueError:  # the parts differ in shape
        return None
    return None if array.dtype == object else array


def documents_of(observation: Any, vocabulary: Sequence[str], size: int, bigrams: bool) -> Corpus | None:
    """A text, texts, or a sparse matrix of counts [D, V], as documents over the words of a run; None for
    anything else.

    vocabulary: the run's words; empty if it knows their numbers alone. size: V. Raises Refusal for a matrix
    of another width, and for texts without a vocabulary.
    """
    if hasattr(observation, "tocsr"):
        corpus = Corpus.from_scipy(observation)
        if corpus.vocabulary_size != size:
            raise Refusal(
                f"the matrix has {corpus.vocabulary_size:,} columns, and the model's vocabulary {size:,} "
                "words. Count these words: CountVectorizer(vocabulary=model.vocabulary)."
            )
        return corpus
    texts = [observation] if isinstance(observation, str) else observation
    if getattr(texts, "ndim", 1) != 1 or not hasattr(texts, "__len__") or not len(texts):
        return None
    if not all(isinstance(text, str) for text in texts):
        return None
    if not vocabulary:
        raise Refusal(
            "the model was fitted without names of its words, so texts cannot be read. Give counts, or fit "
            "anew with --vocabulary."
        )
    counter = WordCounter(Tokens(), vocabulary, bigrams=bigrams)
    for text in texts:
        counter.add(text)
    return counter.finish()


def mask_of(ended: Any, size: int) -> npt.NDArray[np.bool_]:
    """``ended`` as an array [size]. Raises Refusal for another number of rows."""
    mask = np.asarray(without_tensors(ended), np.bool_).ravel()
    if len(mask) != size:
        raise Refusal(f"ended has {len(mask)} rows, and the last observations had {size}.")
    return mask


def pair_hint(observation: Any) -> str:
    """A sentence, after a space, for what an environment's ``reset`` returns in place of an observation."""
    is_pair = isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict)
    return " reset() returns (observation, info): pass the first of the two." if is_pair else ""
