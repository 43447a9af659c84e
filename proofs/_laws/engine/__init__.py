"""Laws of serving: requests, pages, faults, and agreement between ranks."""
