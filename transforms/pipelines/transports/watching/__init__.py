"""Ranks watch each other: which ranks are alive, what failed, and which rank failed first."""
