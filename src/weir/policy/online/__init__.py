"""Solved policies while they serve: the arrival rate that they estimate, and the tables that they use for it."""
