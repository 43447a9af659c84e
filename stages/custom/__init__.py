"""What users bring to stages: functions of their own, checks of what these return, values that they capture and carry,
and whole modules."""
