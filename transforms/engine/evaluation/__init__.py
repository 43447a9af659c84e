"""Evaluation: scores of the model that an engine runs, figures of its serving, and comparisons of
two runs."""
