"""`CAPABILITIES`: the graphs in which a back end of attention can run. It imports nothing, so that
the command line reads the modes of graphs without torch."""

# In no graph; eagerly between two graphs; inside the graph of a decode with one token for each
# request; of any uniform decode; of any batch. Each includes those before.
CAPABILITIES = ("none", "piecewise", "uniform_single_token", "uniform", "full")
