"""How a running model is measured, and how its policy gets new tables while it serves."""
