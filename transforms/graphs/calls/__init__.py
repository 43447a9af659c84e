"""One call of a graphified function: its arguments by role, its memo key, its input buffers and its
results."""
