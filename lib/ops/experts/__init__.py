"""A mixture of experts: the router's choice and the products with the chosen experts."""
