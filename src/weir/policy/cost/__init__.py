"""What a model costs, what latency and energy are worth against each other, and what latency is promised."""
