"""The set-up: the native build, the build of Horovod. Nothing that runs in a job imports it."""
