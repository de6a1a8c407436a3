"""The Python interface of a run: train, resume, load. Its public names are those of ``murmurate`` itself."""
