"""How large the tiles of the products are, and into how many parts a product is split: pure functions of shapes."""


def linear_parts(tokens: int, rows: int, columns: int) -> int:
    """Parts of an FP8 linear layer on CUDA: as many as keep a GPU's multiprocessors busy when there are few tokens."""
    return 1
