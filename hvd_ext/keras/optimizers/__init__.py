"""The distributed optimizers of Keras 3 and Keras 2."""
