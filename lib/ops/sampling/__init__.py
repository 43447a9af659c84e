"""Sampling: rules on logits, random numbers, and the draw of a token."""
