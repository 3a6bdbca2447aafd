"""From costs and an arrival rate to the best table, what a table does, and banks of tables for all rates."""
