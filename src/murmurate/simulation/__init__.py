"""A run on a simulated cluster: real learners and strategies, virtual seconds, any number of replicas."""
