"""Drives the real Batcher in virtual time: any policy, any arrivals, one or several workers.

What arrives            arrivals (its text form), processes, traces
One run                 engine, asking, services, policies, book, runs
What came of it         measuring, spread, statistics, stability, outcome, report, bars; simulator has all in one call
Searches and banks      rounds, trials: quick tries; tuning, promises, banks; solving has all in one call
The paper, pictures     reproduce, paper/; plots/
"""
