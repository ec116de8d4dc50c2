"""A simulation of links and ranks by events; it knows messages and ports, but no plans."""
