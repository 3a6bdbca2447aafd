"""When a batch is cut: pure maths, without I/O, clock or chance.

What every policy is          decision, rules, grammar, loading, conformance
What it is solved from        profile, prices, objective
The paper's model and method  smdp, lookahead, truncation, value_iteration, policy_iteration, solver
Lines too long for that       long_lines, continued, decays
What a table does, exactly    tables, stationary, evaluation; response (ages, following, leftovers, rules_in_line), sampled
A table for every rate        sweep, bank; crew for several workers
Running one                   adaptive, auto: rate, stages, mixing, explanation; drift watches the profile
"""
