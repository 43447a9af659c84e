"""The private names of torch that weft uses, so that a new torch breaks one folder."""
