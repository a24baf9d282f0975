"""Preloaded last into the server that tests fork from: hides its objects from garbage
collection.

Otherwise every fork searches the million objects of torch for garbage, and so copies
the pages they are on.
"""

import atexit
import gc

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # otherwise extension modules report leaks at the end
