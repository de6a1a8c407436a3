"""Several runs of one recipe, each a process and a run folder of its own: sweeps over seeds, and tuning."""
