"""The time of programs: simulated from the costs of their effects, measured as a timeline, or
predicted for a machine; and planning of splits and cohorts by the predicted time."""
