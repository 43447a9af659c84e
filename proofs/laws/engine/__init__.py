"""Laws of serving: of requests, pages, faults and ranks that must agree."""
