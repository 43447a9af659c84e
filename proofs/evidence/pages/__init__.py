"""The makers of the pages that are computed: the reference, the measurements, the notebooks."""
