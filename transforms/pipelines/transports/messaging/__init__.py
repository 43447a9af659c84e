"""Messages between processes: the network of a run, its connections, and what goes over them."""
