"""Checks of what users pass: arguments, names that other engines use, and JSON that somebody else
wrote."""
