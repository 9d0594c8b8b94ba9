"""The training objective: advantages, losses and aggregation as pure tensor functions."""
