"""The running job: `init` and `shutdown`, who is missing, process sets, what ranks agree on, the plans in use."""
