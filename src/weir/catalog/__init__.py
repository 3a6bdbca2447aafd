"""All models of a server: registry, manager, loading, chains, and the model repository."""
