"""The attention of a decoder: rotary embeddings, and functions of one's own over a request's
context."""
