"""How a running model is measured, and how its policy is solved anew while it serves."""
