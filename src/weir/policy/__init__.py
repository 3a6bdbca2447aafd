"""Decides when to dispatch a batch, and how large: pure functions without I/O, clock or randomness.

What every policy is          decision (with the simple policies), loading
cost     what the decision is based on: the profile of a model, the weights of latency and energy, the latency SLO
solve/   the queue as a decision process and its solver: smdp, tables; the best table for one arrival rate, and for
         every rate: bank
online/  a policy while it serves: the estimated arrival rate (arrivals), the tables for it (rate), the decisions and what
         they cost (adaptive), those by tables that were solved jointly (joint), which rows are admitted (admission),
         whether service times have changed (drift)
What else is decided          scaling: how many workers; residency: which models stay in memory; backoff: when a start is
         tried again; solve/device: whose batch is next on a device that models share

Units, where a name does not carry its own: instants and durations in seconds, rates in rows per second, power in
watts. Names with `_ms` and `_mj` are in milliseconds and millijoules, as in the paper that the solver follows (Xu,
Sun, Zhou and Niu, "SMDP-Based Dynamic Batching for Efficient Inference on GPU-Based Platforms", arXiv 2301.12865).
"The paper" and its equation numbers mean that one throughout.
"""
