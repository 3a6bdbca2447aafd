"""When a batch is cut: pure maths, without I/O, clock or chance.

What every policy is          decision, rules, loading, conformance
cost/    what it is solved from: profile, prices, latency_slo
solve/   the model and its best table: smdp (its queues and its solver), stationary, tables, solver;
         what a table does, exactly: evaluation, quantile; a table for every rate: bank
online/  running one: adaptive, auto, rate, rate_bands
"""
