"""The loss: advantages, losses and aggregation as pure tensor functions."""
