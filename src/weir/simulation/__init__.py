"""Drives the real Batcher in virtual time: any policy, any arrivals, one or several workers.

What arrives, and its text form   arrivals
One run                           engine; simulator has all in one call, and says which policies are compared
What came of it                   results, statistics, report
Searches and banks                rounds: the quick model of a search, which a test holds equal to the Batcher; search, banks
"""
