"""Several operators of a step as the instructions of one kernel, which stays on the device until the last has run."""
