"""From texts to token ids, and back to tokens."""
