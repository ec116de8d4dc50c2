"""The papers' closed forms, one module a paper, and those of our schedules; tests compare plans' prices with them.

The planner does not use them: it prices each plan as it runs (hvd_ext/planning/cost).
"""
