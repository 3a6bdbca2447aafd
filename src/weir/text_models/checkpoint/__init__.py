"""Reading a directory with a model of texts: its configuration, weights, pooling and tokenizer."""
