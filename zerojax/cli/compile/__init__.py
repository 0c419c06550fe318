"""`zerojax compile`."""
