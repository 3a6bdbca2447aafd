"""Chains: models whose steps are other models of the same server."""
