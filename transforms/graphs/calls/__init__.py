"""One call of a graphified function: its arguments taken apart, its key, its buffers and its results."""
