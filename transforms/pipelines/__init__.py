"""Pipelines: a step over several stages as checked programs, which a transport executes; also their
simulation."""
