"""Requests on the host: what is asked for, checked (`inputs.py`), the state of all
(`host_state.py`), and pages."""
