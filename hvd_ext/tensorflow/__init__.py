"""The part of hvd_ext that uses TensorFlow; the public names are in `hvd_ext`."""
