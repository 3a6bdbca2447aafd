"""When a batch is cut: pure maths, without I/O, clock or chance.

What every policy is          decision, rules, loading, conformance
cost/    what it is solved from: profile, objective
solve/   the model and its solver: smdp, stationary, tables; what a table does, exactly: evaluation, quantile;
         the best table of one rate, and of every rate: bank
online/  running one: adaptive, rate
"""
