"""Ranks watch one another: which of them are alive, what failed, and which failed first."""
