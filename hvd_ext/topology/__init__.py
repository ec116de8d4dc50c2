"""The cluster as a tree of links: from the host names of a job, or from a YAML file."""
