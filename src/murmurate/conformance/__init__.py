"""What every strategy, learner, source, evaluation and world must do, for those of other packages too.

With pytest installed, in the environment that has the packages::

    pytest --pyargs murmurate.conformance -k my-strategy

Without ``-k`` all that are found are tried, murmurate's own among them (minutes). Tests are called after the
strategy, the algorithm (the part of a recipe's name after the world) or the world that they are about. What
is not installed joins by MURMURATE_IMPORT=my_module.
"""
