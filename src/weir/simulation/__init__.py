"""Runs the real Batcher in virtual time: any policy, any arrivals, one or several workers.

When requests arrive              arrivals
One run                           engine; simulator does everything in one call, for several policies
Its results                       results, statistics, report
Searches and banks                rounds: the fast model of a search, which a test holds equal to the Batcher; search, banks
"""
