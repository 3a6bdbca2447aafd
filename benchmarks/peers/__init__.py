"""What runs in the environments of the peers; nothing of it is imported here."""
