"""Sentence vectors as a service: vectors = encode(texts), on Weir's public surface."""
