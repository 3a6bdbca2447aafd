"""What a server tells of itself: one recorder of events, the metrics that are views of it, logs and traces. It decides
nothing.
"""
