"""Losses: pure functions of tensors.

Unless it says more, a function raises ValueError on a wrong rank or shape (helpers whose callers have checked
do not), and one without "Returns" returns a scalar, or what its first sentence names.
"""
