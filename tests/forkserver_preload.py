"""Preloaded last into the server that tests fork from: hide what it has from garbage collection.

Otherwise each fork looks for garbage among the million objects of torch, and copies their pages.
"""

import atexit
import gc

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # otherwise extension modules report leaks when the server ends
