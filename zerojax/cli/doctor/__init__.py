"""`zerojax doctor`."""
