"""`mar verify`: checks that the data that entered the optimizer is right."""
