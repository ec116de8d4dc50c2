"""What measured the figures of the pages: for the repository, not a part of the package hvd_ext."""
