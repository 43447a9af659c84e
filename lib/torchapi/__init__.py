"""The private names of torch that weft uses, in one folder, so that a new torch breaks only it."""
