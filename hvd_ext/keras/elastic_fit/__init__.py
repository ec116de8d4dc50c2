"""`fit` in a job whose ranks may change: when ranks are lost or join, it continues in the same process, with all its
graphs and slots, from the step that was interrupted.

`progress.py` has how far a training is and how ranks agree on it; `callback.py` the loop around `fit`.
"""
