"""Nests of transforms around drawn functions, called on drawn occasions: what law L25 draws."""
