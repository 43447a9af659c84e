"""How ranks watch one another: signs of life, failures, and which rank is to blame."""
