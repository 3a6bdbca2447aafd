"""The figures of solved policies: maps, curves, timelines, predictions, banks. Each function draws one and writes it."""
