"""Models that were written for other servers, run as they are: each module has what one server's models expect."""
