"""The circle of engines, controller and publisher round the policy, put together. Rank 0 holds it."""
