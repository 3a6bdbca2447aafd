"""Drives the real Batcher in virtual time: any policy, any arrivals, one or several workers."""
