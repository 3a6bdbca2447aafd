"""A page that shows a server while it works. Reads, and never decides."""
