"""Manifests for Kubernetes and KServe, filled from the settings of a server."""
