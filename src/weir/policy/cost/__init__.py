"""The costs that a policy weighs: service times and energies, the weights of latency and energy, the latency SLO."""
