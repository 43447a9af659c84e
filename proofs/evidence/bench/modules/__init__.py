"""Functions that weft's authors did not write: eager, by torch.compile, by weft, and by JAX."""
