"""Batches of requests, their shape classes, and the state that they step."""
