"""What the loss is: advantages, losses and aggregation as pure tensor functions behind a registry."""
