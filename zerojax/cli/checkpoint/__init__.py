"""`zerojax checkpoint`."""
