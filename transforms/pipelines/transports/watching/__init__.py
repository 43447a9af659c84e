"""How ranks watch one another: who is alive, what failed, and on which rank it failed first."""
