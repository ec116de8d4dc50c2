"""The study of buckets: a model's step, replayed with every bucketer without TensorFlow, beside its prediction."""
