"""Captured graphs: `graphify` and `piecewise`, and what they are made of."""
