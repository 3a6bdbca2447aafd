"""The protocols, pure: how each reads a request and writes its answer or error; and the exchange, where a protocol meets a channel and a model."""
