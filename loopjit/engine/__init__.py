"""The flow of a call: signature, memo, trace, canonical program, dispatch.

A function is written down with all that it captures; the key leads to a :class:`State`, which is shared by
all functions that are equal. A state holds programs: for each layout of the arguments, each set of static
values, and each set of avals in each context, one.

On the path of a warm call no key of avals is made: the program that was used last is called, JAX's C++
dispatch knows whether it was compiled for these arguments in this context, and if not, the function under
``jax.jit`` compares, and raises :class:`Mismatch`, which leads to the slow path.

Where sharing would be unsound the state is *private*: the programs belong to one function object, arrays
count by identity, and a fresh function is traced again (and then finds its program by its jaxpr).

Which leaves are static is found by tracing, see ``loopjit/statics/README.rst``; what was found is kept with
the state.

- ``state.py``: what is remembered.
- ``fast.py``, ``trail.py``, ``receiver.py``: the same function object called again.
- ``warm.py``: an equal function, made anew.
- ``job.py``: the slow path; ``call.py`` splits the arguments and traces; ``promotion.py`` finds out which
  leaves are static.
"""
