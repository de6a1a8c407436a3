"""What runs in a peer's own environment too: modules of the standard library and numpy alone."""
