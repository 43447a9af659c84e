"""Transports: what executes a pipeline's programs."""
