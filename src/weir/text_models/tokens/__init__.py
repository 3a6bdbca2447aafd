"""Tokenization: texts to token ids, and token ids back to tokens."""
