"""A rehearsed cluster: network namespaces of this machine stand for hosts, joined by links of a given rate."""
