"""Plans of collectives: pure Python and NumPy, without TensorFlow, MPI, the clock or the environment."""
