"""Manifests for Kubernetes, KServe and KubeRay, filled from the settings of a server."""
