"""The checks of `python -m hvd_ext doctor`, on one machine and in a job."""
