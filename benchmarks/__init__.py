"""Comparisons with the peers: `make bench`, or `python -m benchmarks PART --rounds N`."""
