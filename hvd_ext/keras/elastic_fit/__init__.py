"""`fit` in a job whose ranks may change: when ranks are lost or join, it continues in the same process, with all its
graphs and slots, from the step that was interrupted.

`callback.py` has the loop around `fit`, `progress.py` how far a training is and how ranks agree on it, `carried.py` the
residuals and the like that each rank has of its own, and `calls.py` several calls of `fit` in one program.
"""
