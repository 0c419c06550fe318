"""`zerojax plan`."""
