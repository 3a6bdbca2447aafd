"""One file for each comparison of `make bench PART=NAME`, with what it runs in a child process."""
