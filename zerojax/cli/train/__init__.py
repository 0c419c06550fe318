"""`zerojax train`."""
