"""Functions and modules of users as stages: what functions may capture and carry, and checks of
what they return."""
