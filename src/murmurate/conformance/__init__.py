"""What every strategy, learner, source, evaluation and world must do, those of other packages too: tests.

In an environment with these packages and pytest::

    pytest --pyargs murmurate.conformance -k my-strategy

Without ``-k`` everything that is found is tested, murmurate's own parts too, which takes minutes. The name of
a test contains that of the strategy, of the algorithm (the part of a recipe's name after the world) or of the
world that it tests. A module that is not installed is added by MURMURATE_IMPORT=my_module.
"""
