"""What happens to a batch inside a worker, wherever that is: bytes in, bytes out, and one bad item fails alone."""
