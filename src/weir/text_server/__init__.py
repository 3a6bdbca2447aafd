"""The text server: vectors, scores and labels, over the protocols of several servers."""
