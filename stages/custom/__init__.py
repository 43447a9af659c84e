"""What users bring to stages: functions of their own, the values that these capture and carry, and whole modules."""
