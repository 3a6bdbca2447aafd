"""Policies that follow the traffic while they serve."""
