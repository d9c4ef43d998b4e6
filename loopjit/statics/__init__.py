"""Which leaves of a call's arguments must be static, and why.

- ``calls.py``: one spelling for all spellings of a call.
- ``failure.py``: what an error of JAX says about the leaves whose values were needed.
- ``search.py``: finds exactly those, where the error does not say.
- ``trips.py``: which inputs of a program bound its loops.
- ``lines.py``: the user's line in a traceback.
- ``report.py``: what the user gets to see of it: the table, the notes and the warnings.
"""
