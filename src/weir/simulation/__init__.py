"""Runs the real Batcher in virtual time: any policy, any arrivals, one or several workers.

When requests arrive              arrivals
One run                           engine; simulator does everything in one call, for several policies
Its results                       results, statistics, report
Searches and banks                rounds and replicas: fast models of one queue and of hundreds, which tests hold equal to
                                  the Batcher; search, banks
Numbers of workers                scaling
Models that share a device        device
"""
