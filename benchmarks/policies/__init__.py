"""What solved policies gain beyond the paper, each against the best hand-tuned rules on the same traffic. Simulated.

`python -m benchmarks.policies` plays everything and writes the tables of docs/explanation/beyond-the-paper.md.
"""
