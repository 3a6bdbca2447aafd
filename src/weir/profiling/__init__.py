"""Measures a model through a real executor: service time and energy by batch size."""
