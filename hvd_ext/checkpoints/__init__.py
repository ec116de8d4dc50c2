"""Checkpoints as files: what is in a folder, how it is written so that it is there whole or not at all, signals.

Nothing here knows TensorFlow, Keras or the other ranks; `hvd_ext.keras.checkpoint` puts it together.
"""
