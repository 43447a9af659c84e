"""Transfers between ranks: operators that a graph can replay, and kernels that store into another
GPU's memory."""
