"""Transfers between ranks: operators that a graph can repeat, and kernels that store into another
GPU's memory."""
