"""The study of data: samples that are handed over and kept, by `DataCache`, tf.data and others."""
