"""What `python -m hvd_ext doctor` looks at, on one machine and in a job."""
