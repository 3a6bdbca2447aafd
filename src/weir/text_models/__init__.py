"""Models of texts: checkpoint, tokenizer, network and runtime, without a server."""
