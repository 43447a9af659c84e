"""Messages between processes: the network of a run, its connections, and the data sent by them."""
