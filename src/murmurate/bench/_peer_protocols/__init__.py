"""Modules that also run in the peers' own environments: they import only numpy and the standard library."""
