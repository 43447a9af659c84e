"""Nests of transforms around random functions, with the occasions of their calls, for law L25."""
