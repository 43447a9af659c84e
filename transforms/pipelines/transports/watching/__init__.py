"""How ranks watch one another: what each shows and sees of the others, and what went wrong first."""
