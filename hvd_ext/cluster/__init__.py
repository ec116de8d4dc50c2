"""A rehearsed cluster: network namespaces of this machine stand for hosts, with links of a given rate between them."""
