"""The attention of a decoder: rotary embeddings, and functions for custom attention over a
request's context."""
