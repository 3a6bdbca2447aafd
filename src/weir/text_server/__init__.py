"""A server of texts: vectors, scores and labels, over the protocols of several servers."""
