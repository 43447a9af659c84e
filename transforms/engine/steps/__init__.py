"""A step as data (`step.py`), what runs it without waiting (`executor.py`), and its results on
their way back."""
