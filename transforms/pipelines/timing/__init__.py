"""The time of programs: simulated from the costs of their effects, measured as a timeline,
predicted for a machine; and the splits and cohorts that are planned by it."""
