"""Checks of what users pass: arguments, argument names of other engines, and JSON from outside."""
