"""Pipelines: a step over several stages as checked programs, which a transport executes; also the
simulation of such programs."""
