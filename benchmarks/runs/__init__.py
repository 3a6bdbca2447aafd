"""What is measured in a fresh process of ours; each module prints one line of JSON."""
