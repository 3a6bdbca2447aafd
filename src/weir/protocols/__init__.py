"""From a caller's bytes to a request and back: protocols, the channels that move their bytes, and the exchange between them."""
