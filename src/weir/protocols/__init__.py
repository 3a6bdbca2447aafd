"""The protocols, which read requests and write responses and errors without I/O, and the exchange, which connects a protocol, a channel and a model."""
